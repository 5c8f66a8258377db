// The hashes of rayrec/data/arrays/hashing.py, equal bit by bit.
#pragma once

#include <blake2.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string_view>

namespace rayrec {

static_assert(std::endian::native == std::endian::little, "the files of an export are little-endian");

constexpr uint64_t kTexts = 0x7E3779B97F4A7C15, kGamma = 0x9E3779B97F4A7C15;

// The splitmix64 finalizer (Steele, Lea, Flood 2014).
constexpr uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

constexpr uint64_t seed_of(std::initializer_list<uint64_t> parts) {
  uint64_t state = 0;
  for (uint64_t part : parts) state = mix64(state + kGamma + part);
  return state;
}

// Maps a hash evenly to the rows [0, num_rows).
constexpr int64_t to_row(uint64_t hash, uint64_t num_rows) {
  if (num_rows > uint64_t{1} << 32) return static_cast<int64_t>(hash % num_rows);
  return static_cast<int64_t>(((hash >> 32) * num_rows) >> 32);
}

// The table row of an integer id.
constexpr int64_t hash_row(uint64_t id, uint64_t seed, uint64_t num_rows) {
  if (num_rows > uint64_t{1} << 32) return to_row(mix64(id + seed), num_rows);
  uint32_t state = static_cast<uint32_t>(id) ^ (static_cast<uint32_t>(id >> 32) * 0x9E3779B1u);
  state += static_cast<uint32_t>(seed);
  state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
  state = (state ^ (state >> 13)) * 0xC2B2AE35u;
  return static_cast<int64_t>((state * num_rows) >> 32);
}

// Keyed BLAKE2b of 8 bytes, for texts that a client can choose.
inline uint64_t hash_string(std::string_view text, uint64_t seed) {
  uint64_t hash;
  blake2b(reinterpret_cast<uint8_t*>(&hash), text.data(), &seed, sizeof hash, text.size(), sizeof seed);
  return hash;
}

// Feeds `mix64` eight bytes at a time; the length is the first input.
inline uint64_t hash_text(std::string_view text) {
  uint64_t state = mix64(text.size() + kTexts);
  for (size_t at = 0; at < text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    state = mix64((state ^ word) + kTexts);
  }
  return state;
}

// The table row of a string, by the version of the hash that the export names.
inline int64_t text_row(std::string_view text, uint64_t seed, uint64_t num_rows, int law) {
  if (law == 1) return to_row(hash_string(text, seed), num_rows);
  return hash_row(hash_text(text), seed, num_rows);
}

}  // namespace rayrec
