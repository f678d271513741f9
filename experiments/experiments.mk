# Everyday targets: thin calls of ./kvlab. Parameters are make variables, for example
#   make experiment POLICY=streaming,h2o BUDGET=1024,2048 SET="h2o.recent_share=0.5"
POLICY ?= streaming,h2o,oracle,oracle:power=2
BUDGET ?= 2048
SEED   ?= 1
LENGTH ?= 16384
DEVICE ?= cpu
MODEL  ?= traces/model
SET    ?=
TRACE  ?= traces/data/reasoning-$(LENGTH)-s$(SEED).h5
JOBS   ?= $(shell nproc)
# One word of a shell, whatever it holds.
quote   = '$(subst ','\'',$(1))'
SETS    = $(foreach s,$(SET),--set $(call quote,$(s)))
AGAIN   = @+$(MAKE) -s --no-print-directory -j$(JOBS)

# Identity of the build: rewritten only when it changes, so that nothing else is built again.
$(BUILD)/kv_build.h: FORCE | $(BUILD)/.setup
	@experiments/version.sh '$(CC) $(CFLAGS)$(if $(CUDA_LIBS), CUDA)' >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(BUILD)/experiments/version.o: $(BUILD)/kv_build.h
$(BUILD)/experiments/version.o: CPPFLAGS += -I$(BUILD)
.PHONY: FORCE
FORCE:

# `make` reads package flags while it starts, so everything that needs a build calls make again once the packages are there.
.PHONY: build trace experiment evaluate sweep plots train weights finding bench verify test asan clean format-check ci
build: setup
	$(AGAIN) kvlab

# traces/data/reasoning-<length>-s<seed>.h5, recorded by running the embedded model on DEVICE. Other traces must exist.
traces/data/reasoning-%.h5:
	@mkdir -p $(@D)
	@name='$*'; echo "recording $@" >&2; \
	./kvlab record --model $(call quote,$(MODEL)) --corpus reasoning --length "$${name%-s*}" --seed "$${name#*-s}" --output $@ --device $(call quote,$(DEVICE))

#: make trace [SEED= LENGTH=]              record the default trace (held-out seeds are below 2^31)
trace: build
	$(AGAIN) $(filter traces/data/reasoning-%,$(TRACE))

#: make experiment POLICY= BUDGET= [TRACE= SEED= SET= DEVICE=]
#:                                         replay policies, print the table, write results and pictures
experiment: build
	@./kvlab policies --quiet $(call quote,$(POLICY))
	$(AGAIN) $(filter traces/data/reasoning-%,$(TRACE))
	@./kvlab experiment --trace $(call quote,$(TRACE)) --policy $(call quote,$(POLICY)) --budget $(call quote,$(BUDGET)) --seed $(call quote,$(SEED)) --device $(call quote,$(DEVICE)) $(SETS)
	@BUDGET= plots/draw.sh results/latest

#: make sweep [TRACE= SET=]                18 points: the policies and budgets of experiments/sweep.ini, with pictures
sweep: build
	$(AGAIN) $(filter traces/data/reasoning-%,$(TRACE))
	@./kvlab experiment --config experiments/sweep.ini --trace $(call quote,$(TRACE)) --device $(call quote,$(DEVICE)) $(SETS)
	@BUDGET= plots/draw.sh results/latest

#: make plots [RESULTS=DIR BUDGET= LAYER= KV_HEAD=]
#:                                         draw the pictures of a results folder again (default: the latest)
RESULTS ?= results/latest
plots: build
	@plots/draw.sh $(call quote,$(RESULTS))

#: make evaluate POLICY= BUDGET= [MODEL=]  accuracy of a model under a policy
evaluate: build
	@./kvlab policies --quiet $(call quote,$(POLICY))
	$(AGAIN) $(filter traces/data/reasoning-%,$(TRACE))
	@./kvlab evaluate --model $(call quote,$(MODEL)) --trace $(call quote,$(TRACE)) --policy $(call quote,$(POLICY)) --budget $(call quote,$(BUDGET)) --seed $(call quote,$(SEED)) --device $(call quote,$(DEVICE)) $(SETS)

# Training takes one policy, and traces from seeds of 2147483648 on: every smaller seed is held out for experiments.
TRAIN_POLICY  = $(if $(filter file,$(origin POLICY)),kvpop_mlp,$(POLICY))
TRAIN_FILES   = $(patsubst %,traces/data/reasoning-$(LENGTH)-s%.h5,$(shell seq 2147483648 $$((2147483647 + $(TRAIN_TRACES)))))
# Settings of the shipped weights of this policy and budget; those of SET come after them and win.
TRAIN_SHIPPED = $(shell p=$(call quote,$(TRAIN_POLICY)) b=$(call quote,$(BUDGET)) awk '$$1 == ENVIRON["p"] && $$2 == ENVIRON["b"] {$$1 = $$2 = ""; print}' experiments/shipped.txt)
TRAIN_SETS    = $(foreach s,$(wordlist 2,99,$(TRAIN_SHIPPED)),--set $(TRAIN_POLICY).$(s))
TRAIN_TRACES ?= $(or $(firstword $(TRAIN_SHIPPED)),10)
# A recording on the CPU keeps every core busy; one on the GPU keeps neither it nor the cores busy for long.
RECORD_JOBS   = $(if $(filter gpu,$(DEVICE)),$(shell echo $$(($(JOBS) < 4 ? $(JOBS) : 4))),1)
TRAIN_ARGS    = --policy $(call quote,$(TRAIN_POLICY)) --budget $(call quote,$(BUDGET)) --device $(call quote,$(DEVICE)) \
                $(TRAIN_SETS) $(SETS) $(if $(OUTPUT),--output $(call quote,$(OUTPUT)))
#: make train POLICY= BUDGET= [TRAIN_TRACES= SET= DEVICE= OUTPUT=]
#:                                         train the weights of a learned policy, recording the traces it needs
train: build
	@./kvlab train --dry-run $(TRAIN_ARGS)
	@+$(MAKE) -s --no-print-directory -j$(RECORD_JOBS) $(TRAIN_FILES)
	@./kvlab train $(TRAIN_ARGS) --trace $(TRAIN_FILES)

#: make weights                            train everything that policies/weights ships; what is there is kept
weights: build
	@grep -v '^#' experiments/shipped.txt | while read -r policy budget rest; do \
	    $(MAKE) -s --no-print-directory train POLICY=$$policy BUDGET=$$budget; done

#: make finding [OUT= JOBS= THREADS_PER_RUN= DEVICE=]
#:                                         train and evaluate what experiments/finding/README.md compares
finding: build
	@JOBS='$(if $(filter file,$(origin JOBS)),1,$(JOBS))' DEVICE='$(DEVICE)' experiments/finding/run.sh $(OUT)

#: make bench                              time of the kernels against this machine's ceiling
bench: build
	@./kvlab bench
#: make verify                             GPU against CPU
verify: build
	@./kvlab verify

#: make test                               everything that needs no GPU
test: setup
	$(AGAIN) $(BUILD)/kvtests kvlab
	@tests/run.sh $(BUILD)/kvtests
$(BUILD)/kvtests: | $(BUILD)/kvlab

#: make asan                               the tests under address and undefined-behaviour sanitizers, with a leak gate
asan: setup
	$(AGAIN) SAN=1 OPT=-O1 BUILD=build-asan build-asan/kvtests
	@tests/run_sanitized.sh build-asan/kvtests

#: make format-check                       clang-format on every C file
format-check:
	@git ls-files '*.c' '*.h' | xargs clang-format --dry-run -Werror

#: make ci                                 what .ci/run does: everything, CPU only
ci:
	@.ci/run

#: make clean                              remove builds (results and traces stay)
clean:
	rm -rf build build-asan build-clang build-cuda build-fuzz kvlab
