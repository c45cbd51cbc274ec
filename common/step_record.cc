#include "common/step_record.h"

#include <bit>
#include <limits>

#include <absl/strings/numbers.h>
#include <absl/strings/str_format.h>

namespace ravel {
namespace {

std::string Bits(float value) {
  return absl::StrFormat("%08x", std::bit_cast<uint32_t>(value));
}

float FloatOf(const json::Value& object, std::string_view name, std::string_view bits_name) {
  const json::Value* bits = object.Find(bits_name);
  uint32_t pattern = 0;
  if (bits != nullptr && bits->is_string() && absl::SimpleHexAtoi(bits->AsString(), &pattern)) {
    return std::bit_cast<float>(pattern);
  }
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_number() ? static_cast<float>(value->AsDouble())
                                                : std::numeric_limits<float>::quiet_NaN();
}

double DoubleOf(const json::Value& object, std::string_view name) {
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_number() ? value->AsDouble()
                                                : std::numeric_limits<double>::quiet_NaN();
}

int64_t IntOf(const json::Value& object, std::string_view name) {
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_int() ? value->AsInt() : 0;
}

}  // namespace

json::Value StepRecordJson(const StepRecord& record) {
  json::Value line;
  line.Set("step", record.step);
  line.Set("loss", json::Value::FromFloat(record.loss));
  line.Set("loss_bits", Bits(record.loss));
  line.Set("grad_norm", record.grad_norm);
  line.Set("lr", record.lr);
  line.Set("tokens", record.tokens);
  line.Set("tokens_per_second", record.tokens_per_second);
  line.Set("step_seconds", record.step_seconds);
  line.Set("world_size", record.world_size);
  line.Set("epoch", record.epoch);
  line.Set("attempt", record.attempt);
  line.Set("time_ms", record.time_ms);
  line.Set("planned_bytes", record.planned_bytes);
  line.Set("measured_bytes", record.measured_bytes);
  if (record.skipped) {
    line.Set("skipped", true);
  }
  if (record.loss_scale != 0) {
    line.Set("loss_scale", static_cast<int64_t>(record.loss_scale));  // whole, by its bounds
  }
  if (record.has_validation_loss) {
    line.Set("validation_loss", json::Value::FromFloat(record.validation_loss));
    line.Set("validation_loss_bits", Bits(record.validation_loss));
  }
  return line;
}

absl::StatusOr<StepRecord> ParseStepRecord(std::string_view text) {
  ASSIGN_OR_RETURN(const json::Value line, json::Parse(text));
  if (!line.is_object() || line.Find("step") == nullptr) {
    return absl::DataLossError("a metrics line must be an object with `step`");
  }
  StepRecord record;
  record.step = IntOf(line, "step");
  record.loss = FloatOf(line, "loss", "loss_bits");
  record.grad_norm = DoubleOf(line, "grad_norm");
  record.lr = DoubleOf(line, "lr");
  record.tokens = IntOf(line, "tokens");
  record.tokens_per_second = DoubleOf(line, "tokens_per_second");
  record.step_seconds = DoubleOf(line, "step_seconds");
  record.world_size = IntOf(line, "world_size");
  record.epoch = IntOf(line, "epoch");
  record.attempt = IntOf(line, "attempt");
  record.time_ms = IntOf(line, "time_ms");
  record.planned_bytes = IntOf(line, "planned_bytes");
  record.measured_bytes = IntOf(line, "measured_bytes");
  record.skipped = line.Find("skipped") != nullptr;
  record.loss_scale = line.Find("loss_scale") == nullptr ? 0 : DoubleOf(line, "loss_scale");
  record.has_validation_loss = line.Find("validation_loss") != nullptr;
  if (record.has_validation_loss) {
    record.validation_loss = FloatOf(line, "validation_loss", "validation_loss_bits");
  }
  return record;
}

}  // namespace ravel
