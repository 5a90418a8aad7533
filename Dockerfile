# An image for GPU nodes: the CUDA wheels of JAX bring CUDA, cuDNN and NCCL; the host needs the NVIDIA driver (580 or
# newer for CUDA 13) and the NVIDIA container toolkit.
#
#   docker build -t megajax .
#   docker run --gpus all --shm-size=16g -v /shared/runs:/megajax/runs megajax --config=gpt2_124m
FROM python:3.12-slim

WORKDIR /megajax
COPY . .
RUN pip install --no-cache-dir -e ".[cuda13,data]"

# The first process of the container gets SIGTERM from the scheduler: train.py saves and ends.
ENTRYPOINT ["python", "train.py"]
CMD ["--help"]
