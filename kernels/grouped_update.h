#pragma once

#include "kernels/element_update.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// ElementUpdate with states of any types: fp32, bf16 or fp8 (m: E4M3, v: UE5M3 in bytes), the two
// of them alike or not. As fp8, groups of kUpdateGroup elements of a row (UpdatePiece::row) share a
// scale, one byte of E8M0 at `m_scales` or `v_scales`, which the update chooses anew from the
// largest magnitude of the new values (scalar/fp8_state.h): no code is NaN, and where a value is,
// the scale is. v is rounded by an element's random bits, m by the same with their bytes exchanged
// (scalar/philox.h); bf16 as ElementUpdate has it. `update.table` is there, its pieces begin and
// end where groups do; only rules whose states may be narrow.
struct GroupedUpdateArgs {
  ElementUpdateArgs update;
  TensorView m_scales = {};  // u8, flat; present where m is fp8
  TensorView v_scales = {};
};
void GroupedUpdate(Stream& stream, const GroupedUpdateArgs& args);

}  // namespace ravel::kernels
