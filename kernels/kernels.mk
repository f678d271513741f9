# CUDA part of the build: compiled when nvcc is found, left out otherwise (kvlab then says so when asked for --device gpu).
CUDA_OBJS :=
CUDA_LIBS :=
