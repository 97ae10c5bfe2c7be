#pragma once
// What our own code throws: a message for the user and the status that the C API returns with it.

#include "edgekv.h"

#include <stdexcept>
#include <string>

struct edgekv_error : std::runtime_error {
    edgekv_status status;
    edgekv_error(edgekv_status status, const std::string & what)
        : std::runtime_error(what), status(status) {}
};
