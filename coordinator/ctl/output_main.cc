#include "coordinator/ctl/output_main.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <CLI/CLI.hpp>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

namespace ravel::ctl {
namespace {

constexpr char kWide[] = "wide";  // a table with more columns
constexpr const char* kWideVerbs[] = {"list", "get", "nodes list", "checkpoints list"};

// "nodes list"
std::string ChosenVerb(const CLI::App& app) {
  std::vector<std::string> words;
  for (std::vector<const CLI::App*> level = {&app}; !level.empty();) {
    const CLI::App* const verb = level.front();
    if (verb != &app) {
      words.push_back(verb->get_name());
    }
    level = verb->get_subcommands([](const CLI::App* next) { return next->parsed(); });
  }
  return absl::StrJoin(words, " ");
}

}  // namespace

void AddOutput(CLI::App& app, std::string& text) {
  app.add_option("-o,--output", text, "table, wide, json, yaml, jsonl or name")
      ->capture_default_str();
}

absl::Status ReadOutput(const CLI::App& app, const std::string& text, CommonOptions& common) {
  common.wide = text == kWide;
  const std::string verb = ChosenVerb(app);
  if (common.wide && std::none_of(std::begin(kWideVerbs),
                                  std::end(kWideVerbs),
                                  [&verb](const char* wide) { return verb == wide; })) {
    return absl::InvalidArgumentError(absl::StrCat("--output: wide: ",
                                                   verb,
                                                   " has no wider table; these have: ",
                                                   absl::StrJoin(kWideVerbs, ", ")));
  }
  ASSIGN_OR_RETURN(common.format, ParseFormat(common.wide ? "table" : text));
  return absl::OkStatus();
}

}  // namespace ravel::ctl
