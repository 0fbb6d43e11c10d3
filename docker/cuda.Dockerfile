# docker build -f docker/cuda.Dockerfile -t past-cuda .
# docker run --rm --gpus all -v "$PWD/runs:/work/runs" -v "$HOME/.cache/huggingface:/home/user/.cache/huggingface" past-cuda train paper/past
FROM python:3.12-slim
# Triton compiles its launchers with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home user && mkdir /work && chown user /work
WORKDIR /src
COPY constraints.txt ./
# PyPI's torch for Linux brings its CUDA libraries; the driver is the host's.
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY past_opsd past_opsd
RUN pip install --no-cache-dir --constraint constraints.txt '.[triton,data,tensorboard]'
USER user
WORKDIR /work
ENTRYPOINT ["past"]
