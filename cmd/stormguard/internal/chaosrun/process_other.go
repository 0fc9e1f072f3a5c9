// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package chaosrun

import (
	"os"
	"syscall"
)

// freeze and thaw are signals that this system refuses to send: it cannot stop a process.
var freeze, thaw = os.Interrupt, os.Interrupt

func ownSession() *syscall.SysProcAttr { return nil }
