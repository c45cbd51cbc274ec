#pragma once

// Errors that the world causes travel as absl::Status and absl::StatusOr. Context is added once,
// where more is known: ASSIGN_OR_RETURN(auto text, ReadFile(path));
// RETURN_IF_ERROR(Annotate(Parse(text), path)).

#include <string>
#include <string_view>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

namespace ravel {

// The same code and payloads with `context: ` put before the message; an OK status stays OK.
absl::Status Annotate(const absl::Status& status, std::string_view context);

// A status from errno: `what: strerror`, with the code that fits (ENOENT NotFound, ENOSPC
// ResourceExhausted, EEXIST AlreadyExists, EACCES PermissionDenied, anything else Internal).
absl::Status ErrnoStatus(int error_number, std::string_view what);

}  // namespace ravel

#define RETURN_IF_ERROR(expression)              \
  do {                                           \
    ::absl::Status ravel_status_ = (expression); \
    if (!ravel_status_.ok()) {                   \
      return ravel_status_;                      \
    }                                            \
  } while (false)

#define RAVEL_CONCAT_INNER(a, b) a##b
#define RAVEL_CONCAT(a, b) RAVEL_CONCAT_INNER(a, b)
#define ASSIGN_OR_RETURN(target, expression) \
  RAVEL_ASSIGN_OR_RETURN(RAVEL_CONCAT(ravel_or_, __LINE__), target, expression)
#define RAVEL_ASSIGN_OR_RETURN(result, target, expression) \
  auto result = (expression);                              \
  if (!result.ok()) {                                      \
    return result.status();                                \
  }                                                        \
  target = std::move(result).value()
