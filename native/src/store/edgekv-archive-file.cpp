// Bytes in a file without a name
#include "edgekv-archive-file.h"
#include "edgekv-temporary.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>

#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

static std::runtime_error no_file(const std::string & dir) {
    return std::runtime_error(
        "no file for the archive in " + edgekv_temporary_dir(dir) + ": " + strerror(errno));
}

#ifdef _WIN32
edgekv_archive_file::edgekv_archive_file(const std::string & dir, int64_t size, bool)
    : dir(dir), size(size) {
    errno = ENOSYS;
    throw no_file(dir);
}
edgekv_archive_file::~edgekv_archive_file() {}
bool edgekv_archive_file::write(const char *, size_t, int64_t) { return false; }
bool edgekv_archive_file::read(char *, size_t, int64_t) const { return false; }
#else
edgekv_archive_file::edgekv_archive_file(const std::string & dir, int64_t size, bool maps)
    : dir(dir), size(size), fd(edgekv_temporary(dir)) {
    if (fd < 0) throw no_file(dir);
    if (!maps) return;
    // the whole file, holes where nothing has been written
    void * p = ftruncate(fd, (off_t) size) == 0 ? mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0)
                                                : MAP_FAILED;
    if (p == MAP_FAILED) {
        const auto error = no_file(dir);
        close(fd);
        throw error;
    }
    map = (char *) p;
}

edgekv_archive_file::~edgekv_archive_file() {
    if (map) munmap(map, size);
    close(fd);
}

// one: pwrite or pread
template <typename One, typename Data>
static bool all(One one, int fd, Data * data, size_t n, int64_t at) {
    while (n > 0) {
        const ssize_t done = one(fd, data, n, (off_t) at);
        if (done < 0 && errno == EINTR) continue;
        if (done == 0) errno = EIO; // the file is shorter than it was
        if (done <= 0) return false;
        data += done;
        at += done;
        n -= (size_t) done;
    }
    return true;
}

bool edgekv_archive_file::write(const char * data, size_t n, int64_t at) {
    return all(pwrite, fd, data, n, at);
}
bool edgekv_archive_file::read(char * data, size_t n, int64_t at) const {
    return all(pread, fd, data, n, at);
}
#endif
