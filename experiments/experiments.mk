# Identity of the build: rewritten only when it changes, so that nothing else is built again.
$(BUILD)/kv_build.h: FORCE | $(BUILD)/.setup
	@experiments/version.sh '$(CC) $(CFLAGS)' >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(BUILD)/experiments/version.o: $(BUILD)/kv_build.h
$(BUILD)/experiments/version.o: CPPFLAGS += -I$(BUILD)
.PHONY: FORCE
FORCE:
