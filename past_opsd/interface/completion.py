"""`past completion SHELL`: what a shell runs to complete `past`.

The scripts know no command: at every TAB they ask `past completion --words`, which reads the parser itself. So a script
that was installed once stays right when commands, options, recipes or runs are added.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from past_opsd.core.reading import is_table

SCRIPTS = {
    "bash": """# In ~/.bashrc:  eval "$(past completion bash)"
_past() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _past past
""",
    "zsh": """# In ~/.zshrc, after compinit:  eval "$(past completion zsh)"
_past() {
    local -a found
    found=(${(f)"$(${words[1]} completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _past past
""",
    "fish": """# In ~/.config/fish/config.fish:  past completion fish | source
function _past
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    $words[1] completion --words $words[2..] (commandline --current-token --cut-at-cursor) 2>/dev/null
end
complete --command past --arguments '(_past)'
""",
}


def candidates(build: Callable[[str], argparse.ArgumentParser], words: Sequence[str]) -> list[str]:
    """What the last of the words after `past` may become; nothing where a file or a value of one's own stands."""
    *before, current = words or [""]
    parser = build(before[0] if before else "")
    waiting: argparse.Action | None = None  # the option whose value comes next
    given = 0  # positional arguments of this parser so far
    for word in before:
        options = parser._option_string_actions
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            waiting = options.get(word) if "=" not in word else None
            waiting = None if waiting is not None and waiting.nargs == 0 else waiting
        else:
            inner = _inner(_positional(parser, given), word)
            given += 1
            if inner is not None:
                parser, given = inner, 0
    if current.startswith("-") and waiting is None:
        found: Iterable[str] = (name for name in parser._option_string_actions if name.startswith("--"))
    else:
        found = _values(waiting or _positional(parser, given))
    return sorted(name for name in found if name.startswith(current))


def _positional(parser: argparse.ArgumentParser, index: int) -> argparse.Action | None:
    """The positional argument that a word belongs to; the last may take several."""
    actions = parser._get_positional_actions()
    several = bool(actions) and actions[-1].nargs in ("+", "*")
    return actions[index] if index < len(actions) else actions[-1] if several else None


def _inner(action: argparse.Action | None, word: str) -> argparse.ArgumentParser | None:
    """The parser of a command's action, where the word names one."""
    choices: object = None if action is None else action.choices
    parser: object = choices.get(word) if is_table(choices) else None
    return parser if isinstance(parser, argparse.ArgumentParser) else None


def _values(action: argparse.Action | None) -> Iterable[str]:
    if action is None:
        return ()
    if action.choices is not None:
        return map(str, action.choices)
    if action.dest == "recipe":
        from past_opsd.core import config

        return config.shipped()
    if action.metavar == "RUN":
        return _runs(Path("runs"))
    return ()


def _runs(folder: Path) -> list[str]:
    """Folders of runs, and of comparisons that hold some."""
    found = [file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/recipe.toml")]
    return [str(path) for path in {*found, *(path.parent for path in found)} - {folder}]
