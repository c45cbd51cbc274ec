// Loaded into a program by LD_PRELOAD: its main thread then writes zero in place of subnormal
// numbers, as a library does that was linked with -ffast-math.

namespace {

[[gnu::constructor]] void FlushSubnormals() {
  constexpr unsigned kFlushToZero = 0x8000;
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | kFlushToZero);
}

}  // namespace
