#pragma once

// How far the trainers of an epoch have come on their way to the first step.

#include <string>

#include "coordinator/jobs/job_run.h"

namespace ravel::coordinator {

// "3 of 4 ranks are ready; the last, rank 2 on w1: fetching data, 1.2 GiB so far", from what nodes
// said last. Empty unless trainers are being started. Pure.
std::string WhatStarts(const JobRun& run);

}  // namespace ravel::coordinator
