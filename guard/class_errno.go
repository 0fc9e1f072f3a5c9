// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !plan9

package guard

import "syscall"

// errno is what the system's error number tells: a broken connection, or a resource that
// is used up.
func errno(err error) says {
	switch err { //nolint:errorlint // err alone
	case syscall.ETIMEDOUT:
		return timeoutSaid
	case syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE, syscall.ENOTCONN, syscall.ESHUTDOWN,
		syscall.EHOSTUNREACH, syscall.EHOSTDOWN, syscall.ENETUNREACH, syscall.ENETDOWN, syscall.ENETRESET, syscall.EADDRNOTAVAIL,
		syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS,
		syscall.EIO, syscall.ESTALE:
		return dependencySaid
	default:
		return 0
	}
}
