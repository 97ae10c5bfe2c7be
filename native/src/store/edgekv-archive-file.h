#pragma once
// The file of an archive: without a name, gone with the process. Several archives may share one:
// the first tokens of a conversation and of its branches are the same.

#include "llama.h"

#include <cstdint>
#include <string>

class edgekv_archive_file {
public:
    // size: most bytes that it will hold; maps: it is read in memory too. Throws std::runtime_error
    // if there can be no such file
    edgekv_archive_file(const std::string & dir, int64_t size, bool maps);
    ~edgekv_archive_file();
    edgekv_archive_file(const edgekv_archive_file &) = delete;
    edgekv_archive_file & operator=(const edgekv_archive_file &) = delete;

    // n bytes at a place; false and errno if that cannot be
    bool write(const char * data, size_t n, int64_t at);
    bool read(char * data, size_t n, int64_t at) const;
    const char * mapped() const { return map; } // null: it is not

    const std::string dir;
    const int64_t size;
    const void * writer = nullptr; // the archive that may write behind n_shared tokens
    llama_pos n_shared = 0;        // tokens that several archives may have
    llama_pos n_written = 0;       // tokens behind which nobody has written

private:
    int fd = -1;
    char * map = nullptr;
};
