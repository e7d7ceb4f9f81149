# syntax=docker/dockerfile:1
# docker build --tag kvsidecar:$(git rev-parse --short HEAD) --build-arg REVISION=$(git rev-parse HEAD) .
# (podman and buildah keep the health check with --format docker only.)
# With a client of Mooncake Store, for a cluster tier: --build-arg VARIANT=-mooncake
# The digest is that of the index, for every processor. docs/packages.md says how to renew it, or use another base.
ARG BASE=python:3.12.14-slim-trixie@sha256:f77ac9e44ae96ef2c90b8053ea08c31f8be030f824196b0ae4db6d462c84e51f
ARG VARIANT=

FROM ${BASE} AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY client client
COPY proto proto
COPY kvsidecar kvsidecar
COPY deploy/image deploy/image
# Of the release; the context has no tags.
ARG VERSION=
ARG VARIANT
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# For the compiled kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# Exact versions with hashes (deploy/image/lock.py). The environment has no pip: the image installs nothing later.
RUN pip install --require-hashes --requirement deploy/image/requirements-build.txt \
    && KVSIDECAR_CC=cc SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} \
        pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./client ./ \
    && python -m venv --without-pip /opt/kvsidecar \
    && pip --python /opt/kvsidecar/bin/python install --require-hashes --only-binary :all: \
        --requirement deploy/image/requirements${VARIANT}.txt \
    && pip --python /opt/kvsidecar/bin/python install --no-deps /wheels/*.whl

FROM ${BASE}
ARG VARIANT
# What Mooncake's client links against.
# hadolint ignore=DL3008
RUN if [ "${VARIANT}" = -mooncake ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends libcurl4 libibverbs1 libnuma1 \
        && rm -rf /var/lib/apt/lists/*; \
    fi
ARG REVISION=unknown
ARG VERSION=
LABEL org.opencontainers.image.title="kvsidecar" \
      org.opencontainers.image.description="Per-node KV-offload daemon for LLM engines" \
      org.opencontainers.image.source="https://github.com/kvsidecar/kvsidecar" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvsidecar /opt/kvsidecar
# The NVIDIA container toolkit reads the two NVIDIA variables: it mounts the driver's library, and no GPU resource is taken.
ENV PATH=/opt/kvsidecar/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KVSIDECAR_SOCKET=/run/kvsidecar/kvsidecar.sock \
    KVSIDECAR_HTTP_HOST=0.0.0.0
RUN groupadd --gid 10001 kvsidecar \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --shell /usr/sbin/nologin kvsidecar \
    && install --directory --owner=kvsidecar --group=kvsidecar --mode=0750 /run/kvsidecar
USER 10001:10001
EXPOSE 9464
# Alive, not ready: a container that is pinning, or that refused its pool, must not be restarted. Kubernetes ignores this.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ.get('KVSIDECAR_HTTP_PORT', 9464)}/health\", timeout=4)"]
ENTRYPOINT ["kvsidecar"]
CMD ["serve"]
