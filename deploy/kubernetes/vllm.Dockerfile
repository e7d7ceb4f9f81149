# syntax=docker/dockerfile:1
# vLLM's image with the connector in it:
# docker build --tag vllm-kvsidecar:0.26.0 --file deploy/kubernetes/vllm.Dockerfile .
ARG VLLM=vllm/vllm-openai:v0.26.0
# hadolint ignore=DL3006
FROM ${VLLM}
COPY pyproject.toml README.md LICENSE /opt/kvsidecar/
COPY kvsidecar /opt/kvsidecar/kvsidecar
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check /opt/kvsidecar
