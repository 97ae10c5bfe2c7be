#pragma once
// Environment variables that tests set to go ways which a machine or a model would not take by
// itself. They are looked at where they are asked for, never remembered: a test changes them while
// the library is loaded. See docs/devices.md.

struct edgekv_switches {
    static bool graph_attend(); // EDGEKV_ATTEND=graph: attention goes the generic path
    static bool node_attend();  // EDGEKV_ATTEND=node: the node that devices have a kernel for, here
    static bool f32_attend();   // EDGEKV_ATTEND=f32: a prompt's attention multiplies f32
    static bool rounded();      // EDGEKV_RECENT=rounded: new rows are rounded at once
    static bool whole();        // EDGEKV_WHOLE=1: a prompt's graphs are not cut
    static bool products();     // not EDGEKV_PRODUCTS=0: products by edgekv's kernel
    static double work(double otherwise); // EDGEKV_WORK=N: multiplications at once on a device
};
