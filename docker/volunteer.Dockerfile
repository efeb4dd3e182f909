# A volunteer that trains on the CPU, or on GPUs:
#
#   docker build --file docker/volunteer.Dockerfile --tag diloco-volunteer .
#   docker run --init --volume diloco-identity:/data diloco-volunteer join --run diloco:…
#   docker run --init --gpus all --shm-size 1g --volume diloco-identity:/data diloco-volunteer join --run diloco:…
#
# On x86-64 the default package index has torch with CUDA inside, which adds several GB. PyTorch has an index of CPU
# builds, too; pass its address with --build-arg TORCH_INDEX_URL=… to get a small image. It has no C compiler, which
# torch.compile needs on GPUs; the other one has.

FROM python:3.11 AS build
WORKDIR /source
COPY . .
RUN PIP_CONSTRAINT=/source/constraints.txt pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG TORCH_INDEX_URL=""
# hadolint ignore=DL3008
RUN if [ -z "$TORCH_INDEX_URL" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY constraints.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} /wheels/*.whl \
    && useradd --no-log-init --uid 10001 --create-home --home-dir /data volunteer

# The home folder has the machine's identity (in .config/diloco-peer), and what the hub's models and data sets need.
VOLUME /data
WORKDIR /data
USER 10001:10001
ENTRYPOINT ["diloco-peer"]
CMD ["--help"]
