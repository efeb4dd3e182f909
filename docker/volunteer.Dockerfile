# A volunteer that trains on the CPU, or on GPUs:
#
#   docker build --file docker/volunteer.Dockerfile --build-arg TORCH_INDEX_URL=… --tag diloco-volunteer .
#   docker run --init --volume diloco-identity:/data diloco-volunteer join --run diloco:…
#
#   docker build --file docker/volunteer.Dockerfile --build-arg CUDA=yes --tag diloco-volunteer-cuda .
#   docker run --init --gpus all --shm-size 4g --volume diloco-identity:/data diloco-volunteer-cuda join --run diloco:…
#
# On x86-64 the default package index has torch with CUDA inside, which adds several GB: what CUDA=yes wants, with the C
# compiler that torch.compile needs on GPUs. PyTorch has an index of CPU builds, too: for a small image pass its address
# as TORCH_INDEX_URL. Several GPUs of one container exchange their gradients through /dev/shm: --shm-size.

FROM python:3.11 AS build
ARG CUDA=no
ARG TORCH_INDEX_URL=""
WORKDIR /source
COPY . .
# What a volunteer never loads is left out: torch's tests and programs, what hivemind asks for to average and to be
# built, and, where no compiler is, headers; and bytecode but of what these imports load, which write it anew. Only
# torch's libraries are stripped: numpy's do not load afterwards.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python -m venv /opt/diloco-peer \
    && PIP_CONSTRAINT=/source/constraints.txt /opt/diloco-peer/bin/pip install --no-cache-dir \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} . \
    && /opt/diloco-peer/bin/pip uninstall --yes scipy grpcio grpcio-tools pip
WORKDIR /opt/diloco-peer/lib/python3.11/site-packages
RUN rm -rf torch/test pandas/tests pyarrow/tests sympy/*/tests networkx/*/tests netaddr/tests \
    && find . -name __pycache__ -prune -exec rm -rf {} + \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && find . -name '*.a' -delete \
    && if [ "$CUDA" = no ]; then \
        rm -rf torch/include pyarrow/include && strip --strip-unneeded torch/lib/libtorch_*.so; \
    fi \
    && /opt/diloco-peer/bin/python -c "import torch._dynamo, datasets, transformers.models.llama.modeling_llama, peers.network.daemon; \
        import opendiloco.cli.join, opendiloco.volunteer, opendiloco.training.inner, opendiloco.workers.assembly"

FROM python:3.11-slim
ARG CUDA=no
# hadolint ignore=DL3008
RUN if [ "$CUDA" != no ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --no-log-init --uid 10001 --create-home --home-dir /data volunteer
COPY --from=build /opt/diloco-peer /opt/diloco-peer
ENV HOME=/data PATH=/opt/diloco-peer/bin:$PATH DILOCO_METRICS_PORT=31339

# The home folder has the machine's identity (in .config/diloco-peer), what was compiled for its GPU (in
# .local/state/diloco-peer/compiled), and what the hub's models and data sets need. It is also that of a user without an
# entry in /etc/passwd: docker run --user "$(id -u)" --volume "$PWD/diloco:/data" …
VOLUME /data
WORKDIR /data
USER 10001:10001
EXPOSE 31339
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "from urllib.request import urlopen; from os import environ; urlopen('http://127.0.0.1:' + environ['DILOCO_METRICS_PORT'] + '/healthz', timeout=4)"]
ENTRYPOINT ["diloco-peer"]
CMD ["--help"]
