#include "coordinator/ctl/data_batch.h"

#include <memory>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/plan/sample_order.h"
#include "common/token_file.h"

namespace ravel::ctl {
namespace {

json::Value SampleDocument(const TokenFile& file,
                           const plan::SampleRef& sample,
                           int64_t sequence_length,
                           bool with_source) {
  std::vector<int32_t> ids(static_cast<std::size_t>(sequence_length) + 1);
  file.Read(sample.index * sequence_length, ids);
  json::Array tokens;
  for (const int32_t id : ids) {
    tokens.push_back(static_cast<int64_t>(id));
  }
  json::Value document;
  document.Set("index", sample.index);
  if (with_source) {
    document.Set("source", static_cast<int64_t>(sample.source));
  }
  document.Set("tokens", json::Value(std::move(tokens)));
  return document;
}

}  // namespace

absl::StatusOr<json::Value> BatchDocument(const plan::JobSpec& spec, int64_t step) {
  if (step < 0 || step >= spec.steps) {
    return absl::InvalidArgumentError(
        absl::StrCat("--step: expected 0 to ", spec.steps - 1, ", got ", step));
  }
  std::vector<std::unique_ptr<TokenFile>> files;
  plan::SampleOrderSpec order;
  for (const plan::DataSource& source : spec.data.train) {
    ASSIGN_OR_RETURN(std::unique_ptr<TokenFile> file,
                     TokenFile::Open(source.path, spec.data.format));
    order.sources.push_back(
        {plan::SampleCount(file->tokens(), spec.data.sequence_length), source.weight});
    files.push_back(std::move(file));
  }
  order.seed = spec.seed;
  order.global_batch = spec.global_batch;
  order.lanes = spec.virtual_ranks;
  const std::vector<plan::SampleRef> samples = plan::SamplesOfStep(order, step);
  const int64_t per_lane = DivExact(spec.global_batch, spec.virtual_ranks);
  json::Array lanes;
  for (int64_t lane = 0; lane < spec.virtual_ranks; ++lane) {
    json::Array documents;
    for (int64_t i = lane * per_lane; i < (lane + 1) * per_lane; ++i) {
      const plan::SampleRef& sample = samples[static_cast<std::size_t>(i)];
      documents.push_back(SampleDocument(*files[static_cast<std::size_t>(sample.source)],
                                         sample,
                                         spec.data.sequence_length,
                                         files.size() > 1));
    }
    json::Value entry;
    entry.Set("lane", lane);
    entry.Set("samples", json::Value(std::move(documents)));
    lanes.push_back(std::move(entry));
  }
  json::Value document;
  document.Set("step", step);
  document.Set("lanes", json::Value(std::move(lanes)));
  return document;
}

}  // namespace ravel::ctl
