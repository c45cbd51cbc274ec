#include "common/status.h"

#include <cerrno>
#include <system_error>

#include <absl/strings/str_cat.h>

namespace ravel {

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) {
    return status;
  }
  absl::Status annotated(
      status.code(),
      absl::StrCat(absl::string_view(context.data(), context.size()), ": ", status.message()));
  status.ForEachPayload([&annotated](absl::string_view type, const absl::Cord& payload) {
    annotated.SetPayload(type, payload);
  });
  return annotated;
}

absl::Status ErrnoStatus(int error_number, std::string_view what) {
  const std::string text = absl::StrCat(absl::string_view(what.data(), what.size()),
                                        ": ",
                                        std::system_category().message(error_number));
  switch (error_number) {
    case ENOENT:
      return absl::NotFoundError(text);
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(text);
    case EEXIST:
    case ENOTEMPTY:
      return absl::AlreadyExistsError(text);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace ravel
