# cmake -DINPUT=file -DOUTPUT=file.cc -P embed_file.cmake: the bytes of INPUT as the array of embedded_descriptors.h.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUTPUT} "#include \"coordinator/ctl/embedded_descriptors.h\"
namespace ravel::ctl {
const unsigned char kEmbeddedDescriptors[] = {${bytes}};
const std::size_t kEmbeddedDescriptorsBytes = sizeof kEmbeddedDescriptors;
}  // namespace ravel::ctl
")
