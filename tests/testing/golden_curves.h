#pragma once

// The training runs that PyTorch made once (tests/worker/trainer/golden/make_golden.py).

#include <string>
#include <vector>

namespace ravel::trainer {

struct Recording;

struct GoldenStep {
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
};
// The steps of a case of CaseNames() or CutCaseNames(), which are fp32, or of the former, with
// "_bf16" at its end, of the same in bf16 over fp32 weights; with "_fp16", for some, in fp16 with
// torch's GradScaler; with "_sgd",
// "_sgd_nesterov" or "_lion" at the end of bundled_rope_scaling, by those optimizers. Read from the
// tree that this was built in, or, in a portable bundle, from beside the program; a test fails
// where there is neither, or no such case.
std::vector<GoldenStep> GoldenCurve(const std::string& name);

// The largest relative difference of the losses over all steps, and of the norms. Fails the test
// where the numbers of steps differ, or a learning rate does.
struct CurveDistance {
  double loss = 0;
  double grad_norm = 0;
};
CurveDistance DistanceToGolden(const std::vector<GoldenStep>& golden, const Recording& run);

}  // namespace ravel::trainer
