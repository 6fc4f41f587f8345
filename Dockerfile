# The server on a CPU: docker build -t graftlm .   With a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/graftlm
ENV PATH=/opt/graftlm/bin:$PATH
RUN pip install --no-cache-dir torch --index-url ${TORCH_INDEX}
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir '.[serve,gguf,images]'

FROM python:3.12-slim
# The loops of CPU kernels use OpenMP.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home graftlm
COPY --from=build /opt/graftlm /opt/graftlm
ENV PATH=/opt/graftlm/bin:$PATH PYTHONUNBUFFERED=1
USER graftlm
WORKDIR /home/graftlm
# Compiled loops and facts about the embedded model, so that a container answers soon.
RUN graftlm warm sprout
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT []
# It listens on all addresses, so it needs GRAFTLM_API_KEY.
CMD ["graftlm", "serve", "sprout", "--host", "0.0.0.0"]
