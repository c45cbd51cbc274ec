#include "common/field_error.h"

#include <utility>

#include <absl/strings/cord.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

namespace ravel {
namespace {

constexpr char kUrl[] = "ravel.FieldErrors";

// "3:abc": a text with its length.
void AppendText(std::string_view text, std::string& out) {
  absl::StrAppend(&out, text.size(), ":");
  out.append(text);
}

bool TakeText(std::string_view& rest, std::string& out) {
  const std::size_t colon = rest.find(':');
  std::size_t size = 0;
  if (colon == std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(rest.data(), colon), &size) ||
      size > rest.size() - colon - 1) {
    return false;
  }
  out = std::string(rest.substr(colon + 1, size));
  rest.remove_prefix(colon + 1 + size);
  return true;
}

}  // namespace

absl::Status FieldRefusal(std::string path, std::string expected, std::string got) {
  absl::Status status = absl::InvalidArgumentError(
      absl::StrCat(path, ": expected ", expected, got.empty() ? "" : ", got ", got));
  return WithFieldErrors(std::move(status),
                         {{std::move(path), std::move(expected), std::move(got)}});
}

std::vector<FieldError> FieldErrorsOf(const absl::Status& status) {
  std::vector<FieldError> errors;
  const absl::optional<absl::Cord> payload = status.GetPayload(kUrl);
  const std::string text = payload.has_value() ? std::string(*payload) : "";
  std::string_view rest = text;
  FieldError error;
  while (TakeText(rest, error.path) && TakeText(rest, error.expected) &&
         TakeText(rest, error.got)) {
    errors.push_back(error);
  }
  return errors;
}

absl::Status WithFieldErrors(absl::Status status, const std::vector<FieldError>& errors) {
  std::string text;
  for (const FieldError& error : errors) {
    AppendText(error.path, text);
    AppendText(error.expected, text);
    AppendText(error.got, text);
  }
  if (!text.empty()) {
    status.SetPayload(kUrl, absl::Cord(text));
  }
  return status;
}

}  // namespace ravel
