// G8, our side: the AdamW update of one tensor on CPU threads, beside the streams that it reads and
// writes. Reads lines "FORM THREADS", answers each with one JSON line. Checks results before it
// times them. Forms with the name of a recipe also make amaxes and codes, as a device's host does.

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_format.h>
#include <sys/mman.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/adamw.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/grouped_update.h"
#include "kernels/quantize.h"

namespace ravel::kernels {
namespace {

constexpr int64_t kRow = 4096;
constexpr int kRepeats = 5;

struct Form {
  const char* name;
  bool main;    // an fp32 main weight; else a remainder beside the weight
  bool weight;  // a bf16 weight
  DType gradient;
  DType mean;
  DType square;
  plan::Recipe recipe = plan::Recipe::kNone;
};
constexpr Form kForms[] = {
    {"fp32", true, false, DType::kF32, DType::kF32, DType::kF32},
    {"fp32-weight", true, true, DType::kF32, DType::kF32, DType::kF32},
    {"remainder", false, true, DType::kF32, DType::kF32, DType::kF32},
    {"bf16", false, true, DType::kF32, DType::kBF16, DType::kBF16},
    {"bf16-gradient", false, true, DType::kBF16, DType::kBF16, DType::kBF16},
    {"fp8-bf16", false, true, DType::kF32, DType::kF8E4M3, DType::kBF16},
    {"fp8", false, true, DType::kF32, DType::kF8E4M3, DType::kU8},
    {"fp8_block", true, false, DType::kF32, DType::kF32, DType::kF32, plan::Recipe::kFloat8Block},
    {"mxfp8", true, false, DType::kF32, DType::kF32, DType::kF32, plan::Recipe::kMxFp8}};

enum class Access { kRead, kWrite, kBoth };

// Zeros in huge pages where the system has them, as the trainer's buffers are.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes) : data_(std::aligned_alloc(kPage, Size(RoundUp(bytes, kPage)))) {
    CHECK_MSG(data_ != nullptr, "memory for an operand");
    (void)madvise(data_.get(), Size(RoundUp(bytes, kPage)), MADV_HUGEPAGE);  // only a wish
    std::memset(data_.get(), 0, Size(bytes));
  }
  bool present() const { return data_ != nullptr; }
  std::byte* get() const { return static_cast<std::byte*>(data_.get()); }

 private:
  static constexpr int64_t kPage = int64_t{2} << 20;
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
};

struct Operand {
  Memory memory;
  int64_t offset = 0;  // operands that begin at one offset of a page get into each other's way
  DType dtype = DType::kF32;
  Access access = Access::kBoth;
  int64_t elements = 0;

  int64_t element_bytes() const { return DTypeBytes(dtype); }
  TensorView View(int64_t begin, int64_t count) const {
    if (!memory.present()) {
      return {};
    }
    TensorView view = VectorView(nullptr, count);
    view.dtype = dtype;
    view.data = memory.get() + offset + begin * element_bytes();
    return view;
  }
};

Operand Make(DType dtype, Access access, int64_t elements) {
  static int64_t skew = 0;
  skew = (skew + 1) % 8;
  Operand operand = {.memory = {},
                     .offset = skew * (4096 + 320),
                     .dtype = dtype,
                     .access = access,
                     .elements = elements};
  operand.memory = Memory(elements * DTypeBytes(dtype) + operand.offset);
  return operand;
}

struct Tensor {
  Operand main, weight, remainder, gradient, mean, square, mean_scales, square_scales, codes;
  Operand amaxes;  // u32, few

  std::vector<const Operand*> All() const {
    std::vector<const Operand*> present;
    for (const Operand* operand : {&main, &weight, &remainder, &gradient, &mean, &square, &codes}) {
      if (operand->memory.present()) {
        present.push_back(operand);
      }
    }
    return present;
  }
};

// Blocks of so many elements in rows of kRow.
int64_t Blocks(plan::Recipe recipe, int64_t elements) {
  const int64_t edge = plan::BlockEdge(recipe);
  return DivCeil(elements / kRow, edge) * (kRow / edge);
}

Tensor MakeTensor(const Form& form, int64_t n) {
  Tensor tensor;
  if (form.main) {
    tensor.main = Make(DType::kF32, Access::kBoth, n);
  } else {
    tensor.remainder = Make(DType::kI16, Access::kBoth, n);
  }
  if (form.weight) {
    tensor.weight = Make(DType::kBF16, form.main ? Access::kWrite : Access::kBoth, n);
  }
  tensor.gradient = Make(form.gradient, Access::kRead, n);
  tensor.mean = Make(form.mean, Access::kBoth, n);
  tensor.square = Make(form.square, Access::kBoth, n);
  tensor.mean_scales = Make(DType::kU8, Access::kBoth, n / kUpdateGroup);
  tensor.square_scales = Make(DType::kU8, Access::kBoth, n / kUpdateGroup);
  if (form.recipe != plan::Recipe::kNone) {
    tensor.codes = Make(DType::kU8, Access::kWrite, n);
    tensor.amaxes = Make(DType::kU32, Access::kBoth, Blocks(form.recipe, n));
  }
  for (int64_t i = 0; i < n; ++i) {
    const float g = static_cast<float>(i * 2654435761 % 2001 - 1000) * 1e-5f;
    if (form.gradient == DType::kF32) {
      tensor.gradient.View(0, n).As<float>()[i] = g;
    } else {
      uint32_t bits = 0;
      std::memcpy(&bits, &g, sizeof(bits));
      tensor.gradient.View(0, n).As<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  return tensor;
}

// Elements [begin, begin + count), at multiples of a row.
void Update(const Form& form, const Tensor& tensor, int64_t begin, int64_t count, uint32_t step) {
  CpuStream stream;
  const UpdateScalars scalars = MakeUpdateScalars({.learning_rate = 1e-4}, step + 1, 1.0f);
  if (form.main && !form.weight) {
    AdamWUpdate(stream,
                {.p = tensor.main.View(begin, count),
                 .g = tensor.gradient.View(begin, count),
                 .m = tensor.mean.View(begin, count),
                 .v = tensor.square.View(begin, count),
                 .scalars = scalars});
    return;
  }
  const UpdatePiece piece = {.elements = count, .first_index = begin, .row = kRow};
  GroupedUpdateArgs args = {.update = {.main_weight = tensor.main.View(begin, count),
                                       .weight = tensor.weight.View(begin, count),
                                       .remainder = tensor.remainder.View(begin, count),
                                       .g = tensor.gradient.View(begin, count),
                                       .m = tensor.mean.View(begin, count),
                                       .v = tensor.square.View(begin, count),
                                       .seed = 1,
                                       .step = step,
                                       .scalars = scalars,
                                       .table = {.pieces = &piece, .count = 1}}};
  const int64_t groups = count / kUpdateGroup;
  if (form.mean == DType::kF8E4M3) {
    args.m_scales = tensor.mean_scales.View(begin / kUpdateGroup, groups);
  }
  if (form.square == DType::kU8) {
    args.v_scales = tensor.square_scales.View(begin / kUpdateGroup, groups);
  }
  GroupedUpdate(stream, args);
}

TensorView RowsAt(const Operand& operand, int64_t begin, int64_t rows) {
  TensorView view = MatrixView(nullptr, rows, kRow);
  view.dtype = operand.dtype;
  view.data = operand.View(begin, rows * kRow).data;
  return view;
}

// In parts of 2^16 elements: update and amaxes of one after the other, and codes where blocks end.
// Rows begin at a block.
void UpdateAndEncode(
    const Form& form, const Tensor& tensor, int64_t begin, int64_t count, uint32_t step) {
  if (form.recipe == plan::Recipe::kNone) {
    Update(form, tensor, begin, count, step);
    return;
  }
  constexpr int64_t kPartRows = (int64_t{64} << 10) / kRow;
  CpuStream stream;
  const int64_t edge = plan::BlockEdge(form.recipe);
  TensorView amax =
      MatrixView(nullptr, Blocks(form.recipe, tensor.main.elements) / (kRow / edge), kRow / edge);
  amax.dtype = DType::kU32;
  amax.data = tensor.amaxes.View(0, amax.elements()).data;
  int64_t encoded = begin / kRow;
  for (int64_t row = begin / kRow; row < (begin + count) / kRow; row += kPartRows) {
    Update(form, tensor, row * kRow, kPartRows * kRow, step);
    BlockAmax(stream,
              {.from = RowsAt(tensor.main, row * kRow, kPartRows),
               .first_row = row,
               .edge = edge,
               .amax = amax});
    const int64_t end = (row + kPartRows) / edge * edge;
    if (end > encoded) {
      QuantizeWeight(stream,
                     {.from = RowsAt(tensor.main, encoded * kRow, end - encoded),
                      .first_row = encoded,
                      .scales = {.recipe = form.recipe, .amax = amax},
                      .codes = RowsAt(tensor.codes, encoded * kRow, end - encoded)});
      encoded = end;
    }
  }
}

// The same bytes through registers, a chunk of each operand after the other, and next to no
// arithmetic.
constexpr int64_t kChunk = 64;
using Word = uint64_t __attribute__((vector_size(64), aligned(8)));

__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t StreamOf(
    const std::byte* const* data,
    const Access* access,
    const int64_t* bytes,
    size_t operands,
    int64_t begin,
    int64_t count) {
  Word sum = {};
  for (int64_t at = begin; at < begin + count; at += kChunk) {
    for (size_t operand = 0; operand < operands; ++operand) {
      auto* words =
          reinterpret_cast<Word*>(const_cast<std::byte*>(data[operand] + at * bytes[operand]));
      const int64_t n = kChunk * bytes[operand] / static_cast<int64_t>(sizeof(Word));
      if (access[operand] == Access::kRead) {
        for (int64_t i = 0; i < n; ++i) {
          sum ^= words[i];
        }
      } else if (access[operand] == Access::kWrite) {
        for (int64_t i = 0; i < n; ++i) {
          words[i] = Word{};
        }
      } else {
        for (int64_t i = 0; i < n; ++i) {
          words[i] = words[i] ^ 1;
        }
      }
    }
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}

uint64_t Stream(const Tensor& tensor, int64_t begin, int64_t count) {
  std::vector<const std::byte*> data;
  std::vector<Access> access;
  std::vector<int64_t> bytes;
  for (const Operand* operand : tensor.All()) {
    data.push_back(operand->View(0, count).As<std::byte>());
    access.push_back(operand->access);
    bytes.push_back(operand->element_bytes());
  }
  return StreamOf(data.data(), access.data(), bytes.data(), data.size(), begin, count);
}

double ThreadSeconds() {
  timespec now = {};
  CHECK_MSG(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0, "the clock of a thread");
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds of `work` on equal parts in whole rows, from when all threads are there to when all are
// done. One thread: those in which it ran, whoever else shares its core.
double Seconds(int threads, int64_t n, const std::function<void(int64_t, int64_t)>& work) {
  if (threads == 1) {
    const double start = ThreadSeconds();
    work(0, n);
    return ThreadSeconds() - start;
  }
  std::barrier together(threads + 1);
  std::vector<std::thread> pool;
  const int64_t part = n / kRow / threads * kRow;
  for (int i = 0; i < threads; ++i) {
    pool.emplace_back([&, i] {
      together.arrive_and_wait();
      work(i * part, i + 1 == threads ? n - i * part : part);
      together.arrive_and_wait();
    });
  }
  together.arrive_and_wait();
  const auto start = std::chrono::steady_clock::now();
  together.arrive_and_wait();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (std::thread& thread : pool) {
    thread.join();
  }
  return seconds;
}

// Two steps of 128 rows on this path and in plain loops.
bool IsRight(const Form& form) {
  constexpr int64_t kElements = 128 * kRow;
  const Tensor ours = MakeTensor(form, kElements);
  const Tensor plain = MakeTensor(form, kElements);
  for (uint32_t step = 0; step < 2; ++step) {
    UpdateAndEncode(form, ours, 0, kElements, step);
    cpu::UseSimdPath(cpu::SimdPath::kPortable);
    UpdateAndEncode(form, plain, 0, kElements, step);
    cpu::UseBestSimdPath();
  }
  const auto left = ours.All();
  const auto right = plain.All();
  for (size_t i = 0; i < left.size(); ++i) {
    const size_t bytes = Size(kElements * left[i]->element_bytes());
    const TensorView one = left[i]->View(0, kElements);
    const TensorView other = right[i]->View(0, kElements);
    if (std::memcmp(one.data, other.data, bytes) != 0) {
      return false;
    }
  }
  return true;
}

void Measure(const Form& form, int threads, int64_t n) {
  CHECK_MSG(IsRight(form), "the update has other bits than the plain loops");
  const Tensor tensor = MakeTensor(form, n);
  double bytes = 0;
  for (const Operand* operand : tensor.All()) {
    bytes += static_cast<double>(operand->element_bytes()) *
             (operand->access == Access::kBoth ? 2.0 : 1.0);
  }
  std::vector<double> ours, streams;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {  // the first warms up
    const double update = Seconds(threads, n, [&](int64_t begin, int64_t count) {
      UpdateAndEncode(form, tensor, begin, count, static_cast<uint32_t>(repeat));
    });
    ours.push_back(1e9 * update / static_cast<double>(n));
  }
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    volatile uint64_t sink = 0;
    const double stream = Seconds(
        threads, n, [&](int64_t begin, int64_t count) { sink = Stream(tensor, begin, count); });
    streams.push_back(1e9 * stream / static_cast<double>(n));
  }
  const auto median = [](std::vector<double>& values) {
    values.erase(values.begin());
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  absl::PrintF("{\"ns\": %.4f, \"stream_ns\": %.4f, \"bytes\": %.0f}\n",
               median(ours),
               median(streams),
               bytes);
  std::fflush(stdout);
}

int Serve(int64_t n) {
  std::string name;
  int threads = 0;
  while (std::cin >> name >> threads) {
    const auto form = std::find_if(
        std::begin(kForms), std::end(kForms), [&](const Form& one) { return name == one.name; });
    if (form == std::end(kForms) || threads < 1 || threads > 64) {
      absl::FPrintF(stderr, "no such case: %s %d\n", name, threads);
      return 2;
    }
    Measure(*form, threads, n);
  }
  return 0;
}

}  // namespace
}  // namespace ravel::kernels

// cpu_update_speed MILLIONS: of elements, in units of 2^20.
int main(int argc, char** argv) {
  const int64_t millions = argc > 1 ? std::atoll(argv[1]) : 32;
  if (millions < 1 || millions > 1024) {
    std::fprintf(stderr, "usage: cpu_update_speed [MILLIONS], 1 to 1024\n");
    return 2;
  }
  return ravel::kernels::Serve(millions << 20);
}
