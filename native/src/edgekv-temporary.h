#pragma once
// A file without a name: gone with the process, whatever happens.

#include <cstdlib>
#include <string>

#ifdef _WIN32
#include <cstdio>
#include <io.h>
#else
#include <unistd.h>
#endif

// where it lies if nobody says
inline std::string edgekv_temporary_dir(const std::string & dir) {
    if (!dir.empty()) return dir;
    const char * env = std::getenv("TMPDIR");
    return env && *env ? env : "/tmp";
}

// its descriptor, for its owner to close; -1 and errno if there is none
inline int edgekv_temporary(const std::string & dir) {
#ifdef _WIN32
    (void) dir;
    std::FILE * file = std::tmpfile();
    const int fd = file ? _dup(_fileno(file)) : -1;
    if (file) std::fclose(file);
    return fd;
#else
    std::string path = edgekv_temporary_dir(dir) + "/edgekv-XXXXXX";
    const int fd = mkstemp(&path[0]);
    if (fd >= 0) unlink(path.c_str());
    return fd;
#endif
}
