/* The network of a guest kernel, whose interfaces nobody else sets up. */
#ifndef SANDYARD_NET_H
#define SANDYARD_NET_H

/* 0, or -1 with errno. */
int net_loopback(void);
/* "ADDRESS/PREFIX GATEWAY": the first interface has that address, and everything else is beyond the gateway. */
int net_uplink(const char *text);

#endif
