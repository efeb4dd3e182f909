# A bootstrap node, without torch: about 170 MB on top of Python's own image.
#
#   docker build --file docker/bootstrap.Dockerfile --tag diloco-bootstrap .
#   docker run --init --publish 31337:31337 --publish 31338:31338 --volume diloco-bootstrap:/data diloco-bootstrap \
#       bootstrap --identity /data/bootstrap.pem --announce /ip4/<public address>/tcp/31337 --metrics-port 31339
#
# The health check asks port 31339.

FROM python:3.11 AS build
WORKDIR /source
COPY . .
RUN PIP_CONSTRAINT=/source/constraints.txt pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
COPY docker/bootstrap-requirements.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --requirement /tmp/bootstrap-requirements.txt /wheels/*.whl \
    && useradd --no-log-init --uid 10001 --create-home --home-dir /data bootstrap

# The identity, which fixes the node's address, and the manifests of the runs that it remembers.
VOLUME /data
WORKDIR /data
USER 10001:10001
EXPOSE 31337 31338
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:31339/healthz', timeout=4)"]
ENTRYPOINT ["diloco-peer"]
CMD ["bootstrap", "--identity", "/data/bootstrap.pem", "--listen", "/ip4/0.0.0.0/tcp/31337", "--metrics-port", "31339"]
