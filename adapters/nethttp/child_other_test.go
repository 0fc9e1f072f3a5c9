// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package guardhttp

func asChild() bool { return false } // there is no spill here
