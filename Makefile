# kvlab. `make help` lists the targets. Packages are installed by `make setup`, which every target that builds runs first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

CC       ?= gcc
ifeq ($(origin CC),default)
CC       := gcc
endif
BUILD    ?= build
SAN      ?=#                      SAN=1: address and undefined-behaviour sanitizers
OPT      ?= -O3
V        ?=#                      V=1: show whole commands
Q        := $(if $(V),,@)
SAY      := @$(if $(V),:,echo)
WARN     := -Wall -Wextra -Wconversion -Wshadow -Werror
PACKAGES := hdf5-serial openblas jansson libxxhash zlib
PKG_CFLAGS = $(shell pkg-config --cflags $(PACKAGES) 2>/dev/null)
PKG_LIBS   = $(shell pkg-config --libs $(PACKAGES) 2>/dev/null) -lhdf5_hl -linih

CPPFLAGS = -I. -D_GNU_SOURCE $(PKG_CFLAGS)
CFLAGS   = -std=c11 -g $(OPT) -fopenmp -ffp-contract=off -fno-omit-frame-pointer $(WARN) $(SAN_WARN) $(if $(SAN),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all)
LDFLAGS  = -fopenmp $(if $(SAN),-fsanitize=address$(comma)undefined)
LDLIBS   = $(PKG_LIBS) -lpthread -lm
comma    := ,
# gcc takes the checks that the sanitizers insert for paths of the program, null destinations of snprintf among them.
SAN_WARN = $(if $(SAN),$(if $(findstring clang,$(CC)),,-Wno-format-truncation))

# SRC can be narrowed while one part is developed: make unit T=test_select SRC="reference/core/*.c reference/select.c"
SRC      ?= $(wildcard reference/core/*.c reference/*.c policies/*.c traces/*.c experiments/*.c)
SRCS     := $(filter-out experiments/main.c,$(wildcard $(SRC)))
OBJS     := $(SRCS:%.c=$(BUILD)/%.o)
LIB      := $(BUILD)/libkvlab.a

include kernels/kernels.mk
include experiments/experiments.mk
include tests/fuzz/fuzz.mk

.PHONY: all help setup
.DEFAULT_GOAL := all
all: kvlab

help:
	@sed -n 's/^#: \{0,1\}//p' Makefile kernels/kernels.mk experiments/experiments.mk tests/fuzz/fuzz.mk

#: make setup                              install missing packages (apt), or print the command
setup: $(BUILD)/.setup
$(BUILD)/.setup: experiments/setup.sh
	@mkdir -p $(BUILD)
	@experiments/setup.sh
	@touch $@

#: make                                    build ./kvlab
$(BUILD)/%.o: %.c | $(BUILD)/.setup
	@mkdir -p $(@D)
	$(SAY) "  CC   $<"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(ISA_$(patsubst %.c,%,$(lastword $(subst _, ,$(notdir $<))))) -MMD -MP -c $< -o $@
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c

$(LIB): $(OBJS) $(CUDA_OBJS)
	@rm -f $@
	$(Q)ar rcs $@ $^

kvlab: $(BUILD)/kvlab
	@ln -sf $(BUILD)/kvlab kvlab
$(BUILD)/kvlab: $(BUILD)/experiments/main.o $(LIB)
	$(SAY) "  LINK $@"
	$(Q)$(CC) $(LDFLAGS) $^ $(CUDA_LIBS) $(LDLIBS) -o $@
-include $(OBJS:.o=.d) $(BUILD)/experiments/main.d

# Tests: one Criterion binary. T=test_select test_replay narrows it while developing.
T          ?= $(basename $(notdir $(wildcard tests/test_*.c)))
TEST_OBJS  := $(patsubst %,$(BUILD)/tests/%.o,$(T)) $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/naive/*.c))
$(BUILD)/kvtests: $(TEST_OBJS) $(LIB)
	$(SAY) "  LINK $@"
	$(Q)$(CC) $(LDFLAGS) $^ $(CUDA_LIBS) $(LDLIBS) -lcriterion -o $@
-include $(TEST_OBJS:.o=.d)

.PHONY: unit
#: make unit T=test_select                 build and run the named test files only
unit: $(BUILD)/kvtests
	$(BUILD)/kvtests --timeout 300
