#pragma once

// The part of ravelctl's command line that says how results are printed.

#include <string>

#include "common/status.h"
#include "coordinator/ctl/common_options.h"

namespace CLI {
class App;
}

namespace ravel::ctl {

// Adds --output; `text` outlives `app`.
void AddOutput(CLI::App& app, std::string& text);
// Sets common.format and common.wide from the text. InvalidArgument for an unknown one, and for
// `wide` before a verb that has no wider table.
absl::Status ReadOutput(const CLI::App& app, const std::string& text, CommonOptions& common);

}  // namespace ravel::ctl
