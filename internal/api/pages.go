package api

import (
	"github.com/labstack/echo/v4"

	"example.com/payments/internal/payments"
)

func (s *Server) Docs(echo.Context) error              { return payments.ErrNotFound }
func (s *Server) IdempotencyPolicy(echo.Context) error { return payments.ErrNotFound }
func (s *Server) OpenapiDocument(echo.Context) error   { return payments.ErrNotFound }
func (s *Server) Problem(echo.Context, Slug) error     { return payments.ErrNotFound }
