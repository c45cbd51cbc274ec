#include "worker/data/batch_loader.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "common/token_sample.h"

namespace ravel::data {
namespace {

// The file's ids are those that the job was submitted with, where that is known.
absl::Status CheckSample(const plan::DataSource& source, const TokenFile& file) {
  if (source.sample_digest.empty()) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::string digest,
                   TokenSampleDigest(file.tokens(), [&file](int64_t begin, std::span<int32_t> ids) {
                     file.Read(begin, ids);
                     return absl::OkStatus();
                   }));
  return digest == source.sample_digest
             ? absl::OkStatus()
             : absl::InvalidArgumentError(
                   absl::StrCat(source.path,
                                ": expected the ids that the job was submitted with, found as many "
                                "others; other data cannot go on with this run"));
}

}  // namespace

BatchLoader::BatchLoader(const BatchShape& shape, uint64_t seed)
    : shape_(shape), seed_(seed), row_(Size(shape.sequence_tokens + 1)) {}

absl::StatusOr<std::unique_ptr<BatchLoader>> BatchLoader::Open(const TokenSources& sources,
                                                               const BatchShape& shape,
                                                               uint64_t seed) {
  std::unique_ptr<BatchLoader> loader(new BatchLoader(shape, seed));
  RETURN_IF_ERROR(
      loader->OpenSplit(sources.train, sources.format, "data.train", loader->training_));
  RETURN_IF_ERROR(loader->OpenSplit(
      sources.validation, sources.format, "data.validation", loader->validation_));
  return loader;
}

absl::Status BatchLoader::OpenSplit(const std::vector<plan::DataSource>& sources,
                                    TokenFormat format,
                                    const std::string& field,
                                    Split& split) {
  split.order.seed = seed_;
  split.order.global_batch = shape_.global_batch();
  split.order.lanes = shape_.lanes;
  for (size_t i = 0; i < sources.size(); ++i) {
    const plan::DataSource& source = sources[i];
    auto file = TokenFile::Open(source.path, format);
    if (!file.ok()) {
      return Annotate(file.status(), absl::StrCat(field, "[", i, "]"));
    }
    if (source.tokens != 0 && source.tokens != (*file)->tokens()) {
      return absl::InvalidArgumentError(absl::StrCat(field,
                                                     "[",
                                                     i,
                                                     "]: ",
                                                     source.path,
                                                     ": expected ",
                                                     source.tokens,
                                                     " ids as when the job was submitted, got ",
                                                     (*file)->tokens(),
                                                     "; other data cannot go on with this run"));
    }
    RETURN_IF_ERROR(Annotate(CheckSample(source, **file), absl::StrCat(field, "[", i, "]")));
    const int64_t samples = plan::SampleCount((*file)->tokens(), shape_.sequence_tokens);
    if (samples < 1) {
      return absl::InvalidArgumentError(absl::StrCat(field,
                                                     "[",
                                                     i,
                                                     "]: ",
                                                     source.path,
                                                     ": expected at least ",
                                                     shape_.sequence_tokens + 1,
                                                     " ids (sequenceLength + 1), got ",
                                                     (*file)->tokens()));
    }
    split.order.sources.push_back({.samples = samples, .weight = source.weight});
    split.paths.push_back(source.path);
    split.files.push_back(std::move(*file));
  }
  return absl::OkStatus();
}

absl::Status BatchLoader::LoadTraining(const LaneArgs& args) {
  if (training_.cached_batch != args.batch) {
    training_.samples = plan::SamplesOfStep(training_.order, args.batch);
    training_.cached_batch = args.batch;
  }
  return Load(training_, args);
}

absl::Status BatchLoader::LoadValidation(const LaneArgs& args) {
  CHECK(has_validation());
  if (validation_.cached_batch != args.batch) {
    validation_.samples = plan::EvaluationSamples(validation_.order, args.batch);
    validation_.cached_batch = args.batch;
  }
  return Load(validation_, args);
}

absl::Status BatchLoader::Load(Split& split, const LaneArgs& args) {
  const int64_t length = shape_.sequence_tokens;
  CHECK(args.lane >= 0 && args.lane < shape_.lanes);
  const int64_t first = args.lane * shape_.lane_samples() + args.micro_batch * shape_.sequences;
  CHECK(args.micro_batch >= 0 &&
        (args.micro_batch + 1) * shape_.sequences <= shape_.lane_samples());
  CHECK_EQ(args.ids.elements(), shape_.sequences * length);
  CHECK_EQ(args.targets.elements(), shape_.sequences * length);
  CHECK(args.ids.dtype == DType::kI32 && args.targets.dtype == DType::kI32);
  for (int64_t i = 0; i < shape_.sequences; ++i) {
    const plan::SampleRef& sample = At(split.samples, first + i);
    RETURN_IF_ERROR(ReadSample(split,
                               sample,
                               args.ids.As<int32_t>() + i * length,
                               args.targets.As<int32_t>() + i * length));
  }
  return absl::OkStatus();
}

absl::Status BatchLoader::ReadSample(const Split& split,
                                     const plan::SampleRef& sample,
                                     int32_t* ids,
                                     int32_t* targets) {
  const int64_t length = shape_.sequence_tokens;
  const size_t source = Size(sample.source);
  const int64_t begin = sample.index * length;
  split.files[source]->Read(begin, row_);
  for (size_t i = 0; i < row_.size(); ++i) {
    if (row_[i] < 0 || row_[i] >= shape_.vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat(split.paths[source],
                                                     ": token ",
                                                     begin + static_cast<int64_t>(i),
                                                     " has id ",
                                                     row_[i],
                                                     ", expected 0 to ",
                                                     shape_.vocabulary - 1,
                                                     " (vocab_size ",
                                                     shape_.vocabulary,
                                                     ")"));
    }
  }
  std::copy(row_.begin(), row_.end() - 1, ids);
  std::copy(row_.begin() + 1, row_.end(), targets);
  return absl::OkStatus();
}

void BatchLoader::PrefetchTraining(int64_t step, int64_t lane) {
  const int64_t length = shape_.sequence_tokens;
  const std::vector<plan::SampleRef> samples = plan::SamplesOfStep(training_.order, step);
  for (int64_t i = 0; i < shape_.lane_samples(); ++i) {
    const plan::SampleRef& sample = At(samples, lane * shape_.lane_samples() + i);
    At(training_.files, sample.source)->Prefetch(sample.index * length, length + 1);
  }
}

}  // namespace ravel::data
