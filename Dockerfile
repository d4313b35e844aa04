# Penstock in a container. docs/containers.md says how to build and run it.
#   docker build --target run --tag penstock:latest .   the embedded engines and the torch learner, on CPUs or GPUs
#   docker build --tag penstock:sglang .                SGLang's environment beside it, for GPUs

FROM python:3.11-slim-bookworm AS run
# make sets up, gcc compiles what Triton launches kernels with.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
# From where packages come is the builder's affair, as it is pip's outside: torch is the build that this index offers.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1
WORKDIR /penstock
COPY . .
RUN make .venv/.ready-run
ENV PATH=/penstock/.venv/bin:$PATH \
    PENSTOCK_ENVS=/penstock-envs \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["penstock"]
CMD ["--help"]

FROM run AS sglang
RUN penstock env sglang
