#include "common/crypto.h"

#include <openssl/evp.h>
#include <openssl/rand.h>

#include "common/check.h"

namespace ravel {

struct Sha256Stream::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256Stream::Sha256Stream() : state_(std::make_unique<State>()) {
  CHECK(state_->context != nullptr);
  CHECK_EQ(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr), 1);
}
Sha256Stream::~Sha256Stream() = default;

void Sha256Stream::Update(std::string_view bytes) {
  CHECK_EQ(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()), 1);
}

Sha256Digest Sha256Stream::Finish() {
  Sha256Digest digest = {};
  unsigned int size = 0;
  CHECK_EQ(EVP_DigestFinal_ex(state_->context, digest.data(), &size), 1);
  CHECK_EQ(size, digest.size());
  return digest;
}

Sha256Digest Sha256(std::string_view bytes) {
  Sha256Stream stream;
  stream.Update(bytes);
  return stream.Finish();
}

std::string Hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

std::string RandomBytes(size_t bytes) {
  std::string random(bytes, '\0');
  CHECK_EQ(RAND_bytes(reinterpret_cast<unsigned char*>(random.data()), static_cast<int>(bytes)), 1);
  return random;
}

std::string RandomHex(size_t bytes) {
  return Hex(RandomBytes(bytes));
}

std::string RandomUuid() {
  std::string random = RandomBytes(16);
  random[6] = static_cast<char>((static_cast<uint8_t>(random[6]) & 0x0f) | 0x40);  // version 4
  random[8] = static_cast<char>((static_cast<uint8_t>(random[8]) & 0x3f) | 0x80);  // variant 1
  const std::string hex = Hex(random);
  return hex.substr(0, 8) + "-" + hex.substr(8, 4) + "-" + hex.substr(12, 4) + "-" +
         hex.substr(16, 4) + "-" + hex.substr(20);
}

}  // namespace ravel
