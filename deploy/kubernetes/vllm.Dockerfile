# syntax=docker/dockerfile:1
# vLLM's image with the connector in it:
# docker build --tag vllm-kvsidecar:0.26.0 --file deploy/kubernetes/vllm.Dockerfile .
ARG VLLM=vllm/vllm-openai:v0.26.0@sha256:ffb2d59b1c059a5bd8d781320c9f5189de8293693b7d95da54befddaa54abf52
# hadolint ignore=DL3006
FROM ${VLLM}
# The client, with the connector: nothing of the daemon's dependencies.
COPY client /opt/kvsidecar/client
COPY proto /opt/kvsidecar/proto
COPY kvsidecar /opt/kvsidecar/kvsidecar
ARG VERSION=
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} python3 -m pip install --no-cache-dir --disable-pip-version-check /opt/kvsidecar/client
