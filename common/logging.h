#pragma once

// Structured logs: one JSON object per line on stderr (time, level, message, and the fields set for
// the process). Thread-safe.

#include <string>
#include <string_view>

namespace ravel::log {

enum class Level { kDebug, kInfo, kWarning, kError };

// Console: short text lines for people (ravelctl, --dev-loopback terminals). Json: for everything
// that is collected.
enum class Format { kJson, kConsole };

void Init(std::string_view program, Format format, Level level);
// A field of every later line, such as job, epoch, rank; an empty value removes it.
void SetField(std::string_view key, std::string_view value);

void Write(Level level, std::string_view message);
inline void Debug(std::string_view message) {
  Write(Level::kDebug, message);
}
inline void Info(std::string_view message) {
  Write(Level::kInfo, message);
}
inline void Warning(std::string_view message) {
  Write(Level::kWarning, message);
}
inline void Error(std::string_view message) {
  Write(Level::kError, message);
}

}  // namespace ravel::log
