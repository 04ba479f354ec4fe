# SGLang with tree attention, and its kernels compiled. Building needs no GPU:
#   python -m build --wheel
#   docker build -f deploy/docker/sglang.Dockerfile -t deft-sglang:0.3.0 .
#   docker run --gpus all --shm-size 16g -p 30000:30000 deft-sglang:0.3.0 --model-path Qwen/Qwen3-8B
FROM lmsysorg/sglang:v0.5.23

ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY dist/deft_backend-0.3.0-py3-none-any.whl /opt/deft/wheel/
RUN python3 -m pip install --no-cache-dir /opt/deft/wheel/*.whl && deft --version

# The kernels of common models: heads of one GPU as query heads/KV heads, and GPUs to compile for.
# Other models compile theirs at the first start. Build with --build-arg HEADS=… to add yours.
ARG HEADS="32/8 64/8 16/2"
ARG HEAD_DIM=128
ARG TARGETS="sm_80 sm_90"
RUN for target in $TARGETS; do \
        for heads in $HEADS; do \
            deft warm --host sglang --heads "$heads" --head-dim "$HEAD_DIM" --dtype bf16 \
                --target "$target" --out /opt/deft/kernels || exit 1; \
        done; \
    done && chmod -R a+rX /opt/deft
ENV DEFT_KERNEL_CACHE=/opt/deft/kernels

EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--attention-backend", "deft", "--host", "0.0.0.0", "--port", "30000", "--enable-metrics"]
