#pragma once

// Hashes and random identifiers, over OpenSSL. Thread-safe.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace ravel {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest Sha256(std::string_view bytes);
// True for 64 lower-case hexadecimal digits, as Hex writes such a digest.
bool IsSha256Text(std::string_view text);

// SHA-256 of bytes that come in parts. Thread-compatible.
class Sha256Stream {
 public:
  Sha256Stream();
  ~Sha256Stream();
  Sha256Stream(const Sha256Stream&) = delete;
  Sha256Stream& operator=(const Sha256Stream&) = delete;

  void Update(std::string_view bytes);
  // Once; nothing may follow.
  Sha256Digest Finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Lower-case hexadecimal, two digits a byte.
std::string Hex(std::string_view bytes);
inline std::string Hex(const Sha256Digest& digest) {
  return Hex(std::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

// `bytes` bytes of the system's cryptographic generator; CHECKs that there is one.
std::string RandomBytes(size_t bytes);
// 2 * `bytes` hexadecimal digits.
std::string RandomHex(size_t bytes);
// The bytes that lower- or upper-case hexadecimal digits stand for; empty for other texts.
std::string Unhex(std::string_view hex);

// Signatures by Ed25519 (RFC 8032). A private key is 32 random bytes, a public key 32 bytes, a
// signature 64. CHECKs the size of private keys.
inline constexpr size_t kSigningKeyBytes = 32;
std::string PublicKeyOf(std::string_view private_key);
std::string Sign(std::string_view private_key, std::string_view bytes);
// False also for keys and signatures of another size.
bool IsSignature(std::string_view public_key, std::string_view bytes, std::string_view signature);

// A version 4 UUID: "f81d4fae-7dec-4d0a-a765-00a0c91e6bf6".
std::string RandomUuid();

}  // namespace ravel
