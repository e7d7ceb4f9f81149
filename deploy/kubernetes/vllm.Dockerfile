# syntax=docker/dockerfile:1
# vLLM's image with the connector in it:
# docker build --tag vllm-kvsidecar:0.33.0 --file deploy/kubernetes/vllm.Dockerfile .
# To pin it: --build-arg VLLM=vllm/vllm-openai:v0.33.0@sha256:..., with the digest that
# `docker buildx imagetools inspect vllm/vllm-openai:v0.33.0` prints.
ARG VLLM=vllm/vllm-openai:v0.33.0
# hadolint ignore=DL3006
FROM ${VLLM}
# The client, with the connector: nothing of the daemon's dependencies.
COPY client /opt/kvsidecar/client
COPY proto /opt/kvsidecar/proto
COPY kvsidecar /opt/kvsidecar/kvsidecar
ARG VERSION=
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} python3 -m pip install --no-cache-dir --disable-pip-version-check /opt/kvsidecar/client
