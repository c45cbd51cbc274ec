#pragma once

// Typed positions of the things that a plan consists of.
//
// An id is the position of a thing in the IdVector of its kind. Ids of two kinds neither compare
// nor convert, and an IdVector is not indexed by an id of another kind: tests/common/plan/ids_test
// holds what must not compile.

#include <compare>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

namespace ravel::plan {

template <typename Kind>
class Id {
 public:
  // No thing: -1. For instructions also the start of the program, before everything else.
  constexpr Id() = default;
  // From a number: a literal, or a field of a message.
  // NOLINTNEXTLINE(google-explicit-constructor): literals read as ids
  constexpr Id(int value) : value_(value) {}

  // The position as a number, for texts and messages. Ids do not convert by themselves.
  constexpr int value() const { return value_; }
  explicit constexpr operator size_t() const { return static_cast<size_t>(value_); }

  constexpr Id& operator++() {
    ++value_;
    return *this;
  }
  constexpr Id& operator--() {
    --value_;
    return *this;
  }
  constexpr auto operator<=>(const Id&) const = default;

  template <typename Stream>
  friend Stream& operator<<(Stream& stream, Id id) {
    return stream << id.value_;
  }

 private:
  int value_ = -1;
};

using UnitId = Id<struct UnitTag>;                // ModelInventory::units
using TensorId = Id<struct TensorTag>;            // ModelInventory::tensors
using BundleId = Id<struct BundleTag>;            // ModelInventory::bundles
using GroupId = Id<struct GroupTag>;              // ShardingPlan::groups
using BufferId = Id<struct BufferTag>;            // ShardingPlan::buffers
using InstructionId = Id<struct InstructionTag>;  // StepProgram::instructions
using GradientId = Id<struct GradientTag>;        // ModelUses::gradients
using MoveId = Id<struct MoveTag>;                // MoveTable::moves
using SegmentId = Id<struct SegmentTag>;          // SegmentsOf of a pass of a unit
using StateId = Id<struct StateTag>;              // SavePlan::tensors

// The ids [0, end) for a range-based loop.
template <typename IdType>
class IdRange {
 public:
  class Iterator {
   public:
    explicit constexpr Iterator(IdType at) : at_(at) {}
    constexpr IdType operator*() const { return at_; }
    constexpr Iterator& operator++() {
      ++at_;
      return *this;
    }
    constexpr bool operator==(const Iterator&) const = default;

   private:
    IdType at_;
  };

  explicit constexpr IdRange(IdType end) : end_(end) {}
  constexpr Iterator begin() const { return Iterator(0); }
  constexpr Iterator end() const { return Iterator(end_); }

 private:
  IdType end_;
};

// A vector whose elements are found by ids. Positions that are no ids are of type size_t, as in any
// vector.
template <typename IdType, typename T>
class IdVector : public std::vector<T> {
 public:
  using Base = std::vector<T>;
  using Base::Base;
  IdVector() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): the same elements, now with ids
  IdVector(Base&& elements) : Base(std::move(elements)) {}
  IdVector(std::initializer_list<T> elements) : Base(elements) {}

  typename Base::reference operator[](IdType id) { return (*this)[static_cast<size_t>(id)]; }
  typename Base::const_reference operator[](IdType id) const {
    return (*this)[static_cast<size_t>(id)];
  }
  typename Base::reference operator[](std::same_as<size_t> auto position) {
    return Base::operator[](position);
  }
  typename Base::const_reference operator[](std::same_as<size_t> auto position) const {
    return Base::operator[](position);
  }

  // One past the last id.
  IdType end_id() const { return static_cast<int>(this->size()); }
  IdType last_id() const { return static_cast<int>(this->size()) - 1; }
  IdRange<IdType> ids() const { return IdRange<IdType>(end_id()); }
  bool Has(IdType id) const { return id >= 0 && id < end_id(); }
  // Appends an element and returns its id.
  IdType Add(T element) {
    this->push_back(std::move(element));
    return last_id();
  }
};

}  // namespace ravel::plan
