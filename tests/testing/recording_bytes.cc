#include "tests/testing/recording_bytes.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

namespace ravel::trainer {
namespace {

using Tensors = std::map<std::string, std::vector<float>>;

template <typename T>
void PutItems(const std::vector<T>& items, std::string& out) {
  static_assert(std::is_trivially_copyable_v<T>);
  const uint64_t count = items.size();
  out.append(reinterpret_cast<const char*>(&count), sizeof(count));
  out.append(reinterpret_cast<const char*>(items.data()), count * sizeof(T));
}

void PutTensors(const Tensors& tensors, std::string& out) {
  PutItems(std::vector<uint64_t>{tensors.size()}, out);
  for (const auto& [name, values] : tensors) {
    PutItems(std::vector<char>(name.begin(), name.end()), out);
    PutItems(values, out);
  }
}

// Takes items from the front of the bytes; nothing after a first error.
class BytesReader {
 public:
  explicit BytesReader(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  std::vector<T> Items() {
    uint64_t count = 0;
    Take(&count, sizeof(count));
    if (good_ && count > (bytes_.size() - at_) / sizeof(T)) {
      good_ = false;
    }
    std::vector<T> items(good_ ? count : 0);
    Take(items.data(), items.size() * sizeof(T));
    return items;
  }
  Tensors NamedTensors() {
    Tensors tensors;
    const std::vector<uint64_t> count = Items<uint64_t>();
    for (uint64_t i = 0; good_ && i < (count.empty() ? 0 : count[0]); ++i) {
      const std::vector<char> name = Items<char>();
      tensors[std::string(name.begin(), name.end())] = Items<float>();
    }
    return tensors;
  }
  bool at_end() const { return good_ && at_ == bytes_.size(); }

 private:
  void Take(void* to, size_t bytes) {
    if (!good_ || bytes > bytes_.size() - at_) {
      good_ = false;
      return;
    }
    std::memcpy(to, bytes_.data() + at_, bytes);
    at_ += bytes;
  }

  const std::string& bytes_;
  size_t at_ = 0;
  bool good_ = true;
};

}  // namespace

std::string RecordingBytes(const Recording& recording) {
  std::string out;
  PutItems(recording.steps, out);
  PutItems(recording.validation, out);
  PutTensors(recording.weights, out);
  PutTensors(recording.exp_avg, out);
  PutTensors(recording.exp_avg_sq, out);
  PutItems(std::vector<int64_t>{recording.updates}, out);
  return out;
}

absl::StatusOr<Recording> RecordingOfBytes(const std::string& bytes) {
  BytesReader reader(bytes);
  Recording recording;
  recording.steps = reader.Items<StepResult>();
  recording.validation = reader.Items<float>();
  recording.weights = reader.NamedTensors();
  recording.exp_avg = reader.NamedTensors();
  recording.exp_avg_sq = reader.NamedTensors();
  const std::vector<int64_t> updates = reader.Items<int64_t>();
  if (!reader.at_end() || updates.size() != 1) {
    return absl::InvalidArgumentError("the bytes are no recording");
  }
  recording.updates = updates[0];
  return recording;
}

}  // namespace ravel::trainer
