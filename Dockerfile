# syntax=docker/dockerfile:1
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY kvsidecar kvsidecar
RUN python -m venv /opt/kvsidecar && /opt/kvsidecar/bin/pip install --no-cache-dir .

FROM python:3.12-slim
LABEL org.opencontainers.image.title="kvsidecar" \
      org.opencontainers.image.description="Per-node KV-offload daemon for LLM engines" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvsidecar /opt/kvsidecar
# The NVIDIA container toolkit reads these: the driver library is mounted, no GPU resource is taken.
ENV PATH=/opt/kvsidecar/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KVSIDECAR_SOCKET=/run/kvsidecar/kvsidecar.sock \
    KVSIDECAR_HTTP_HOST=0.0.0.0
RUN useradd --system --uid 10001 --user-group --no-create-home kvsidecar \
    && install --directory --owner=kvsidecar --group=kvsidecar --mode=0750 /run/kvsidecar
USER 10001:10001
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=3s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/health', timeout=2)"]
ENTRYPOINT ["kvsidecar"]
CMD ["serve"]
