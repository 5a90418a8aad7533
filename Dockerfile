# An image for GPU nodes: the CUDA wheels of JAX bring CUDA, cuDNN and NCCL; the host needs the NVIDIA driver (580 or
# newer for CUDA 13) and the NVIDIA container toolkit.
#
#   docker build -t megajax .
#   docker run --gpus all --shm-size=16g --user "$(id -u):$(id -g)" -v /shared/runs:/megajax/runs megajax \
#     --config=gpt2_124m
#   docker run --gpus all --user "$(id -u):$(id -g)" -v /shared/runs:/megajax/runs -p 127.0.0.1:8000:8000 \
#     --entrypoint python megajax infer.py serve --run=runs/gpt2_124m --host=0.0.0.0
#
# A tag may be another image tomorrow. CONTRIBUTING.md says how a release names the digest of its base:
#   docker build --build-arg BASE=python:3.12-slim@sha256:... -t megajax .
ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /megajax
COPY . .
# runs and caches can be written by any user, because files in a mounted directory belong to the one of --user.
RUN pip install --no-cache-dir -e ".[cuda13,data,hugging_face,serve]" \
  && useradd --no-create-home --uid 1000 megajax \
  && install --directory --mode=1777 runs .cache
ENV HOME=/tmp
USER 1000

# The first process of the container gets SIGTERM from the scheduler: train.py saves and ends.
ENTRYPOINT ["python", "train.py"]
CMD ["--help"]
