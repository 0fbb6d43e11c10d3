# docker build -f docker/cpu.Dockerfile -t past .
# PyTorch's index of CPU builds as --build-arg TORCH_INDEX=... keeps CUDA's libraries out of the image.
# docker run --rm -v "$PWD/runs:/work/runs" past demo
FROM python:3.12-slim
RUN useradd --create-home user && mkdir /work && chown user /work
WORKDIR /src
COPY constraints.txt ./
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY past_opsd past_opsd
RUN pip install --no-cache-dir --constraint constraints.txt .
USER user
WORKDIR /work
ENTRYPOINT ["past"]
