# Headway with what training needs, on a CPU or on NVIDIA GPUs; the base is an argument:
#
#     docker build --tag headway .
#     docker build --tag headway --build-arg BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04 .
#     docker run --rm --gpus all --ipc host --volume "$PWD":/work headway train train.yaml
#
# TORCH_INDEX is the index of other builds of torch that pytorch.org names, such as those for a CPU alone.
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG EXTRAS=train,demo
ARG TORCH_INDEX=

# torch.compile calls a C++ compiler and reads Python's headers
RUN apt-get update && \
    apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /opt/headway
ENV PATH=/opt/headway/bin:$PATH

COPY . /src
RUN cd /src && \
    pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)" && \
    pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

WORKDIR /work
ENTRYPOINT ["headway"]
CMD ["--help"]
