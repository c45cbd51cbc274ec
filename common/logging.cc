#include "common/logging.h"

#include <map>
#include <memory>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "common/clock.h"
#include "common/json.h"
#include "common/mutex.h"
#include "common/time_text.h"

namespace ravel::log {
namespace {

struct State {
  Mutex mutex;
  std::string program ABSL_GUARDED_BY(mutex) = "ravel";
  Format format ABSL_GUARDED_BY(mutex) = Format::kJson;
  Level level ABSL_GUARDED_BY(mutex) = Level::kInfo;
  std::map<std::string, std::string> fields ABSL_GUARDED_BY(mutex);
  std::shared_ptr<spdlog::logger> logger;  // shared, as its library wants it
};

// Never destroyed: threads may log while the process ends.
State& GetState() {
  static State* const state = [] {
    State* const made = new State;
    made->logger = std::make_shared<spdlog::logger>(
        "ravel", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->logger->set_pattern("%v");
    made->logger->set_level(spdlog::level::trace);
    made->logger->flush_on(spdlog::level::trace);
    return made;
  }();
  return *state;
}

const char* LevelName(Level level) {
  switch (level) {
    case Level::kDebug:
      return "debug";
    case Level::kInfo:
      return "info";
    case Level::kWarning:
      return "warning";
    case Level::kError:
      return "error";
  }
  return "error";
}

std::string JsonLine(const State& state, Level level, std::string_view message)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  json::Value line;
  line.Set("time", FormatTime(SystemClock::Get().WallMs()));
  line.Set("level", LevelName(level));
  line.Set("program", state.program);
  for (const auto& [key, value] : state.fields) {
    line.Set(key, value);
  }
  line.Set("message", message);
  return json::Serialize(line);
}

std::string ConsoleLine(const State& state, Level level, std::string_view message)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  std::string line = state.program + ": ";
  if (level != Level::kInfo) {
    line += std::string(LevelName(level)) + ": ";
  }
  line += message;
  for (const auto& [key, value] : state.fields) {
    line += " " + key + "=" + value;
  }
  return line;
}

}  // namespace

void Init(std::string_view program, Format format, Level level) {
  State& state = GetState();
  MutexLock lock(state.mutex);
  state.program = std::string(program);
  state.format = format;
  state.level = level;
}

void SetField(std::string_view key, std::string_view value) {
  State& state = GetState();
  MutexLock lock(state.mutex);
  if (value.empty()) {
    state.fields.erase(std::string(key));
  } else {
    state.fields[std::string(key)] = std::string(value);
  }
}

void Write(Level level, std::string_view message) {
  State& state = GetState();
  std::string line;
  {
    MutexLock lock(state.mutex);
    if (level < state.level) {
      return;
    }
    line = state.format == Format::kJson ? JsonLine(state, level, message)
                                         : ConsoleLine(state, level, message);
  }
  state.logger->log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace ravel::log
