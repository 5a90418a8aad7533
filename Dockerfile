# An image for GPU nodes: the CUDA wheels of JAX bring CUDA, cuDNN and NCCL; the host needs the NVIDIA driver (580 or
# newer for CUDA 13) and the NVIDIA container toolkit.
#
#   docker build -t megajax .
#   docker run --gpus all --shm-size=16g -v /shared/runs:/megajax/runs megajax --config=gpt2_124m
#   docker run --gpus all -v /shared/runs:/megajax/runs -p 127.0.0.1:8000:8000 --entrypoint python megajax \
#     infer.py serve --run=runs/gpt2_124m --host=0.0.0.0
FROM python:3.12-slim

WORKDIR /megajax
COPY . .
RUN pip install --no-cache-dir -e ".[cuda13,data,hugging_face,serve]"

# The first process of the container gets SIGTERM from the scheduler: train.py saves and ends.
ENTRYPOINT ["python", "train.py"]
CMD ["--help"]
