#include "common/field_error.h"

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(FieldError, PartsComeBackHoweverTheStatusWasPassedOn) {
  const absl::Status refusal =
      FieldRefusal("training.globalBatch", "a multiple of 8: no, got less", "6, got 7");
  EXPECT_EQ(refusal.message(),
            "training.globalBatch: expected a multiple of 8: no, got less, got 6, got 7");
  const std::vector<FieldError> parts = {
      {"training.globalBatch", "a multiple of 8: no, got less", "6, got 7"}};
  EXPECT_EQ(FieldErrorsOf(refusal), parts);
  EXPECT_EQ(FieldErrorsOf(Annotate(refusal, "at size 4")), parts);
  EXPECT_EQ(FieldRefusal("model", "a configuration").message(), "model: expected a configuration");
}

TEST(FieldError, OtherStatusesCarryNoneOrMany) {
  EXPECT_TRUE(FieldErrorsOf(absl::InvalidArgumentError("a: expected b, got c")).empty());
  EXPECT_TRUE(FieldErrorsOf(absl::OkStatus()).empty());
  const std::vector<FieldError> many = {{"a", "", ""}, {"b", "x:1:y", "\n"}};
  EXPECT_EQ(FieldErrorsOf(WithFieldErrors(absl::FailedPreconditionError("no"), many)), many);
}

}  // namespace
}  // namespace ravel
