#include "common/crypto.h"

#include <algorithm>

#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include "common/check.h"

namespace ravel {
namespace {

constexpr size_t kSignatureBytes = 64;

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using SigningKey = std::unique_ptr<EVP_PKEY, FreeKey>;
struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
using DigestContext = std::unique_ptr<EVP_MD_CTX, FreeContext>;

const uint8_t* Bytes(std::string_view bytes) {
  return reinterpret_cast<const uint8_t*>(bytes.data());
}

}  // namespace

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

bool IsSha256Text(std::string_view text) {
  return text.size() == 2 * sizeof(Sha256Digest) &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
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

std::string Unhex(std::string_view hex) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    const int high = digit(hex[i]);
    const int low = i + 1 < hex.size() ? digit(hex[i + 1]) : -1;
    if (high < 0 || low < 0) {
      return "";
    }
    bytes.push_back(static_cast<char>(high * 16 + low));
  }
  return bytes;
}

std::string PublicKeyOf(std::string_view private_key) {
  const SigningKey key(EVP_PKEY_new_raw_private_key(
      EVP_PKEY_ED25519, nullptr, Bytes(private_key), private_key.size()));
  CHECK(key.get() != nullptr);
  std::string bytes(kSigningKeyBytes, '\0');
  size_t size = bytes.size();
  CHECK_EQ(EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<uint8_t*>(bytes.data()), &size),
           1);
  CHECK_EQ(size, bytes.size());
  return bytes;
}

std::string Sign(std::string_view private_key, std::string_view bytes) {
  const SigningKey key(EVP_PKEY_new_raw_private_key(
      EVP_PKEY_ED25519, nullptr, Bytes(private_key), private_key.size()));
  CHECK(key.get() != nullptr);
  const DigestContext context(EVP_MD_CTX_new());
  CHECK_EQ(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key.get()), 1);
  std::string signature(kSignatureBytes, '\0');
  size_t size = signature.size();
  CHECK_EQ(EVP_DigestSign(context.get(),
                          reinterpret_cast<uint8_t*>(signature.data()),
                          &size,
                          Bytes(bytes),
                          bytes.size()),
           1);
  CHECK_EQ(size, signature.size());
  return signature;
}

bool IsSignature(std::string_view public_key, std::string_view bytes, std::string_view signature) {
  const SigningKey key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, Bytes(public_key), public_key.size()));
  const DigestContext context(EVP_MD_CTX_new());
  const bool verified =
      key.get() != nullptr && signature.size() == kSignatureBytes &&
      EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
      EVP_DigestVerify(
          context.get(), Bytes(signature), signature.size(), Bytes(bytes), bytes.size()) == 1;
  ERR_clear_error();  // else another caller of this thread would find it
  return verified;
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
