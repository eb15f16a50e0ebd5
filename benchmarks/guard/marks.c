/* Marks between which valgrind's callgrind counts instructions; does nothing without valgrind. */
#include <valgrind/callgrind.h>

void begin(void) {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

void end(void) {
  CALLGRIND_DUMP_STATS;
  CALLGRIND_STOP_INSTRUMENTATION;
}
