from __future__ import annotations

import pytest

from past_opsd.core.launch import first_node, restarted, restarts, settle, slurm
from past_opsd.core.nouns import PastError

TASK = {
    "SLURM_JOB_ID": "81234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[05-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def without(*names: str) -> dict[str, str]:
    return {k: v for k, v in TASK.items() if k not in names}


def test_a_task_of_srun_knows_its_place():
    """The first rank is on the step's first machine, not where srun was called."""
    found = slurm(TASK)
    assert found.pop("MASTER_PORT") == str(15000 + 81234 % 15000)
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
    }


def test_steps_of_one_job_do_not_meet():
    ports = {slurm(TASK | {"SLURM_STEP_ID": str(i)})["MASTER_PORT"] for i in range(10)}
    assert len(ports) == 10
    assert all(15000 <= int(port) < 30000 for port in ports)


@pytest.mark.parametrize(
    "given",
    [
        {},
        without("SLURM_STEP_ID"),  # a script of sbatch, which is task 0 of as many as were asked for
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in a step of its own inside a larger allocation
        TASK | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun inside a task
        TASK | {"WORLD_SIZE": "1"},
    ],
)
def test_whoever_is_not_a_task_of_several_stays_alone(given: dict[str, str]):
    assert slurm(given) == {}


def test_what_is_missing_is_taken_from_the_job():
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    found = slurm(without(*names) | {"SLURM_TASKS_PER_NODE": "5,3"})
    assert (found["WORLD_SIZE"], found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == ("8", "gpu05", "3")
    assert slurm(without(*names, "SLURM_JOB_NODELIST"))["MASTER_ADDR"] == "10.0.0.1"
    assert slurm(without(*names))["LOCAL_WORLD_SIZE"] == "8"


def test_an_address_that_was_set_is_kept():
    given = TASK | {"MASTER_ADDR": "here", "MASTER_PORT": "12"}
    settle(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"], given["RANK"]) == ("here", "12", "5")
    again = dict(given)
    settle(again)
    assert again == given


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("node[7,9-11],other3", "node7"),
        ("alone", "alone"),
        ("a,b,c", "a"),
        ("rack[2-3]n[010-012]-ib,z1", "rack2n010-ib"),
        ("n-1-[4]", "n-1-4"),
        ("", ""),
    ],
)
def test_first_node(nodes: str, first: str):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (TASK | {"SLURM_PROCID": "x"}, "SLURM_PROCID = 'x' is not a number"),
        (without("SLURM_LOCALID"), "SLURM_LOCALID = '' is not a number"),
        (TASK | {"SLURM_NODEID": "2"}, "counts fewer machines"),
        (without("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"), "names no machine"),
    ],
)
def test_what_cannot_be_is_said(given: dict[str, str], said: str):
    with pytest.raises(PastError, match=said):
        slurm(given)


def test_what_torchrun_says_of_restarts():
    counts = [{"TORCHELASTIC_RESTART_COUNT": str(n), "TORCHELASTIC_MAX_RESTARTS": "1"} for n in (0, 1)]
    assert [restarted(given) for given in ({}, *counts)] == [False, False, True]
    assert [restarts(given) for given in ({}, *counts)] == [False, True, False]
